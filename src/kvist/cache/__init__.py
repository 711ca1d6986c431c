"""The cache: what a token leaves behind (rows), how it is written (encoding), where (addressing), and who holds it."""

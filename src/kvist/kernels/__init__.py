"""Operations over the cache: contract (ops), a readable reference, native kernels, the choice between them."""

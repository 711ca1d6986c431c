"""What one token costs on a real model, as the text grows.

With a cache a step projects one token at any depth, while its attention reads everything before it and grows. Without
one the whole text is projected again for every token: that is the work a cache removes, and scoring is the work that
stays.
"""

import sys

from kvist.learn import StepTimer, same_bits

model, depths = sys.argv[1], (128, 512, 1024, 2048, 4096)
timer = StepTimer(model, ctx_size=depths[-1] + 16)
parts = ("projections", "attention", "feed forward", "head and rest")
result, whole, equal = {"model": model, "parts": parts, "cached": [], "recomputed": []}, dict.fromkeys(parts, 0.0), []
print(f"{model}: milliseconds of one token" + " " * 30 + "the same without a cache")
print("  depth " + "".join(f"{part:>14}" for part in parts) + "  |" + "".join(f"{part:>14}" for part in parts))
for depth in depths:
    while timer.length < depth:
        for part, seconds in timer.feed(min(128, depth - timer.length)).items():
            whole[part] += seconds
    steps = []
    for _ in range(15):
        steps.append(timer.feed())
        logits = timer.logits
        timer.back(1)
    timer.feed_whole()
    equal.append(same_bits(logits, timer.logits))
    timer.back(1)
    result["cached"].append([depth, *(min(step[part] for step in steps) * 1e3 for part in parts)])
    result["recomputed"].append([depth, *(whole[part] * 1e3 for part in parts)])
    print(f"{depth:7,} " + "".join(f"{ms:14.2f}" for ms in result["cached"][-1][1:]), end="  |")
    print("".join(f"{ms:14.1f}" for ms in result["recomputed"][-1][1:]))
checks = {"timed one by one, the operations give the bits that they give in one call": all(equal)}
assert all(checks.values()), checks

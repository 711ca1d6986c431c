"""Figure 27-1 on a real model. Projections counted and steps timed, with a cache and without.

The engine counts every token that it puts through the layers, and generates the same text both ways. Without a cache a
step costs more the longer the text gets; with one it stays a single token's work.
"""

import sys
import time

import kvist
from kvist.learn import prose

model, prompt, count = sys.argv[1], 8, 100
result = {"model": model, "prompt": prompt}
for way, cache in [("without", False), ("with", True)]:
    with kvist.load(model, ctx_size=256, cache=cache) as llm:
        ids = llm.tokenizer.encode(prose()[:4000])[:prompt]
        request = llm.engine.submit(ids, kvist.Sampling(max_tokens=count, ignore_eos=True))
        done, seconds = [], []
        while not llm.engine.idle:
            begin = time.perf_counter()
            llm.engine.step()
            seconds.append(time.perf_counter() - begin)
            done.append(request.projections)
    result[way] = {"projections": done, "seconds": seconds, "ids": request.generated}

print(f"{model}, from a prompt of {prompt} tokens")
print("  text   projections without, with   times less   ms of the step without, with")
for step in (0, 9, 39, 69, 99):
    without, with_ = (result[way]["projections"][step] for way in ("without", "with"))
    slow, fast = (result[way]["seconds"][step] * 1e3 for way in ("without", "with"))
    print(f"{prompt + step:6}   {without:19,}, {with_:4,}   {without / with_:10.1f}   {slow:22.1f}, {fast:4.1f}")

lengths = range(prompt, prompt + count)
formula = [n * (n + 1) // 2 - prompt * (prompt - 1) // 2 for n in lengths]  # no step was run within the prompt
checks = {"without a cache the count is n(n + 1)/2, from the prompt on": result["without"]["projections"] == formula}
checks["with one it is n"] = result["with"]["projections"] == list(lengths)
checks["the text is the same"] = result["with"]["ids"] == result["without"]["ids"]
assert all(checks.values()), checks

"""The vLLM side of ``offline.py``, run by the Python of an environment that has vLLM.

VLLM_PYTHON benchmarks/offline_vllm.py CHECKPOINT NUM INPUT OUTPUT
"""

import json
import random
import sys
import time

from vllm import LLM, SamplingParams


def main() -> None:
    path, num, num_input, num_output = sys.argv[1], *map(int, sys.argv[2:5])
    rng = random.Random(0)
    prompts = [{"prompt_token_ids": [rng.randrange(10, 8000) for _ in range(num_input)]} for _ in range(num)]
    llm = LLM(path, dtype="bfloat16", max_model_len=4096, enable_prefix_caching=False)
    sampling = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
    llm.generate(prompts[:4], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    start_s = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start_s
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(
        json.dumps({"peer": "vllm", "num_tokens": num_tokens, "seconds": seconds, "tokens_per_s": num_tokens / seconds})
    )


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers on what model_bench times: reading a prompt, and decoding after it over a full cache.

  bench/model/transformers_peer.py --model DIR --out FILE.json      (needs PyTorch and transformers: bench/peers/make_venv)

The layout of the results is that of model_bench, so that `bench/tables.py` puts both into one table. Tokens are random
and the same in each run: what is timed does not depend on them. The logits of the last row are computed, as by
model_bench, and no others.
"""
import argparse
import datetime
import json
import os
import statistics
import time
from pathlib import Path


def cpu_name():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")


def spread(times):
    ordered = sorted(times)
    return {"ms": statistics.median(ordered), "min_ms": ordered[0], "p90_ms": ordered[round(0.9 * (len(ordered) - 1))]}


def measure(torch, transformers, arguments, dtype):
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, dtype)).eval()
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, model.config.vocab_size, (1, arguments.prompt), generator=generator)
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters()) / 1e6
    entries = []
    with torch.inference_mode():
        model(prompt[:, :64], logits_to_keep=1)
        prefills = []
        for _ in range(arguments.prefills):
            begin = time.perf_counter()
            out = model(prompt, use_cache=True, logits_to_keep=1)
            prefills.append((time.perf_counter() - begin) * 1e3)
        entries.append({"name": f"model/prefill/{dtype}", "weights_mb": weights, **spread(prefills)})
        cache, steps = out.past_key_values, []
        for step in range(arguments.steps + 3):
            token = out.logits[:, -1:].argmax(-1)
            begin = time.perf_counter()
            out = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1)
            if step >= 3:  # the first steps warm up
                steps.append((time.perf_counter() - begin) * 1e3)
        entries.append({"name": f"model/decode/{dtype}", "weights_mb": weights, **spread(steps)})
    return entries


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face folder, such as scripts/fetch-model makes")
    parser.add_argument("--prompt", type=int, default=1425, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=48, help="tokens that are decoded and timed")
    parser.add_argument("--prefills", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--out", type=Path, help="JSON; default: standard output")
    arguments = parser.parse_args()
    import torch  # pylint: disable=import-outside-toplevel  # --help needs neither
    import transformers  # pylint: disable=import-outside-toplevel

    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.disable_progress_bar()
    context = {"cpu": cpu_name(), "num_cpus": os.cpu_count(), "threads": arguments.threads,
               "date": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
               "model": Path(arguments.model).name, "prompt": str(arguments.prompt), "load_avg": list(os.getloadavg()),
               "versions": f"transformers {transformers.__version__}, PyTorch {torch.__version__}"}
    entries = [entry for dtype in arguments.dtypes for entry in measure(torch, transformers, arguments, dtype)]
    text = json.dumps({"context": context, "benchmarks": entries}, indent=1) + "\n"
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()

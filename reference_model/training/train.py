# SPDX-License-Identifier: Apache-2.0
"""Trains a small byte-level Llama to find facts in a long text.

    python train.py --out runs/keyfinder --minutes 70            # the target model
    python train.py --out runs/keyfinder --minutes 70 --resume   # goes on after an interruption

Lengths grow in stages, and every stage mixes long and short texts: a model trained on one length
at a time forgets the shorter ones. A stage ends once nine of ten answers at its longest length
are exact, or when its share of the budget is spent. Progress is measured in minutes, or in tokens
where --tokens is given (then equal seeds and threads give equal runs).
"""
import argparse
import json
import math
import signal
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import checkpoint
import data
from model import Llama, Shape
from warm_start import warm_start

# (lengths, tokens a step, share of the budget after which the stage ends in any case, share of
# texts with two-step questions, share of texts that restate facts instead of asking)
STAGES = [
    ([128, 192, 256, 384], 4096, 0.2, 0.0, 0.6),
    ([128, 256, 384, 512, 768], 4096, 0.32, 0.15, 0.3),
    ([256, 512, 1024, 1536], 6144, 0.48, 0.15, 0.1),
    ([384, 768, 1536, 2048, 3072], 6144, 0.68, 0.15, 0.0),
    ([512, 1024, 2048, 4096, 8192], 8192, 1.0, 0.15, 0.0),
]


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", required=True, help="folder for checkpoint.pt, written every few minutes")
    p.add_argument("--minutes", type=float, default=70, help="budget; the schedule stretches to fill it")
    p.add_argument("--tokens", type=float, default=0, help="budget in tokens instead of minutes")
    p.add_argument("--resume", action="store_true", help="go on from checkpoint.pt")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--text", help="a file with the King James text; default: the program `bible`")
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--width", type=int, default=192)
    p.add_argument("--query-heads", type=int, default=8)
    p.add_argument("--kv-heads", type=int, default=4)
    p.add_argument("--mlp", type=int, default=512)
    p.add_argument("--lr", type=float, default=2e-3, help="highest learning rate")
    p.add_argument("--optimizer", choices=["muon", "adamw"], default="muon",
                   help="of the weight matrices; all else is AdamW's in any case")
    p.add_argument("--first-stage", type=int, default=0, help="0 to 4; with --resume: skip to it")
    p.add_argument("--cold", action="store_true", help="random initial weights, not those of warm_start.py")
    p.add_argument("--lengths", type=int, nargs="+", help="one stage of these lengths instead of the five")
    p.add_argument("--teacher", help="a saved folder: learn its next-byte distribution (a draft model)")
    p.add_argument("--float32", action="store_true", help="no bfloat16 in matrix products")
    p.add_argument("--checkpoint-minutes", type=float, default=3)
    return p.parse_args()


def make_optimizers(model, args):
    """Muon orthogonalises the update of each matrix; scaled so that AdamW's rates fit it too."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and ".layers." in n)]
    if args.optimizer == "adamw":
        return [torch.optim.AdamW(matrices + others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)]
    return [torch.optim.Muon(matrices, lr=args.lr, momentum=0.95, weight_decay=0.01,
                             adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)]


def learning_rate(args, progress, step):
    warm = min(1.0, (step + 1) / 100)
    return args.lr * warm * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def exact_answers(logits, samples):
    """(exact single answers, asked, exact two-step answers, asked) of a batch.

    A greedy decoder writes an answer exactly if and only if every byte of it is the likeliest one
    after the true bytes before it, so one forward pass measures what generation would do."""
    guess = logits.argmax(-1).cpu().numpy()
    counts = np.zeros(4, int)
    for row, sample in zip(guess, samples):
        for start, text, two_step in sample.answers:
            exact = row[start - 1:start - 1 + len(text)].astype(np.uint8).tobytes() == text
            counts[2 * two_step:2 * two_step + 2] += (exact, 1)
    return counts


def main():
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    stages = [(args.lengths, 4096, 1.0, 0.1, 0.0)] if args.lengths else STAGES
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_text, _ = data.split(data.read_kjv(args.text))
    shape = Shape(layers=args.layers, width=args.width, query_heads=args.query_heads,
                  kv_heads=args.kv_heads, mlp=args.mlp)
    model = Llama(shape)
    if not args.cold:
        warm_start(model, args.seed)
    model.to(device)
    teacher = checkpoint.load(args.teacher).to(device) if args.teacher else None
    optimizers = make_optimizers(model, args)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)

    done = {"step": 0, "tokens": 0, "seconds": 0.0, "stage": args.first_stage}
    if args.resume and (out / "checkpoint.pt").exists():
        saved = torch.load(out / "checkpoint.pt", map_location=device, weights_only=False)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"]):
            optimizer.load_state_dict(state)
        rng.bit_generator.state = saved["rng"]
        done = saved["done"]
        done["stage"] = max(done["stage"], args.first_stage)
    print(f"{model.parameter_count() / 1e6:.2f} M parameters, {device}, {json.dumps(asdict(shape))}", flush=True)

    def save():
        torch.save({"shape": asdict(shape), "model": model.state_dict(), "done": done, "rng": rng.bit_generator.state,
                    "optimizers": [o.state_dict() for o in optimizers]}, out / "checkpoint.tmp")
        (out / "checkpoint.tmp").replace(out / "checkpoint.pt")    # so that the file is always complete

    # SIGTERM ends the training with a checkpoint.
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    earlier, began, last_save, last_line = done["seconds"], time.time(), time.time(), time.time()
    accuracy, text_loss, line_tokens, two = {}, None, 0, None
    while True:
        done["seconds"] = earlier + time.time() - began
        progress = done["tokens"] / args.tokens if args.tokens else done["seconds"] / 60 / args.minutes
        if progress >= 1 or stop:
            break
        lengths, step_tokens, until, pair_share, restate_share = stages[done["stage"]]
        learned = accuracy.get(lengths[-1], 0) >= 0.9
        if done["stage"] + 1 < len(stages) and (progress > until or learned):
            done["stage"] += 1
            print(f"stage {done['stage']}: lengths {stages[done['stage']][0]}", flush=True)
            continue

        length = int(rng.choice(lengths))
        batch = max(1, step_tokens // length)
        tokens, positions, weights, samples = data.training_batch(rng, train_text, length, batch, pair_share,
                                                                   restate_share)
        tokens = torch.from_numpy(tokens.astype(np.int64)).to(device)
        weights = torch.from_numpy(weights).to(device)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args, progress, done["step"])
            optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=not args.float32):
            positions = torch.from_numpy(positions).to(device)
            logits = model(tokens[:, :-1], positions)
            with torch.no_grad():
                taught = teacher(tokens[:, :-1], positions) if teacher else None
        losses = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        w = weights.flatten()
        loss = (losses * w).sum() / w.sum()
        if teacher:
            # A draft is to say what its target would say, so all bytes count alike.
            loss = F.cross_entropy(logits.float().flatten(0, 1), taught.float().softmax(-1).flatten(0, 1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()

        with torch.no_grad():
            plain = losses[w == 1].mean().item()
        counts = exact_answers(logits.detach(), samples)
        mix = lambda old, new, keep: new if old is None else keep * old + (1 - keep) * new
        if counts[1]:
            accuracy[length] = mix(accuracy.get(length, 0.0), counts[0] / counts[1], 0.9)
        if counts[3]:
            two = mix(two, counts[2] / counts[3], 0.95)
        text_loss = mix(text_loss, plain, 0.95)
        done["step"] += 1
        done["tokens"] += length * batch
        line_tokens += length * batch

        now = time.time()
        if now - last_line > 20:
            left = (1 - progress) / max(progress, 1e-9) * done["seconds"]
            agree = (f"  agrees {(logits.argmax(-1) == taught.argmax(-1)).float().mean():.2f}" if teacher else "")
            print(f"{done['seconds'] / 60:6.1f} min  step {done['step']:6d}  {done['tokens'] / 1e6:7.2f} M tokens  "
                  f"{line_tokens / (now - last_line):6.0f} tokens/s  loss {loss.item():.3f}  text {text_loss:.3f}  exact "
                  + " ".join(f"{n}:{accuracy[n]:.2f}" for n in sorted(accuracy))
                  + (f"  two-step {two:.2f}" if two is not None else "")
                  + agree + f"  stage {done['stage']}  {left / 60:.0f} min left", flush=True)
            last_line, line_tokens = now, 0
        if now - last_save > 60 * args.checkpoint_minutes:
            save()
            last_save = time.time()
    save()
    print(f"done: {done['seconds'] / 60:.1f} minutes, {done['tokens'] / 1e6:.2f} M tokens", flush=True)


if __name__ == "__main__":
    main()

"""Writes a run of an audit as a rollout file: what an inference engine hands to a trainer.

python examples/export_rollout.py AUDIT ROLLOUT.jsonl [RUN]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pyarrow.parquet as pq


def main(audit: Path, output: Path, run: str = "record") -> None:
    """One line a sequence, in the format of docs/formats.md."""
    tokens = pq.read_table(audit / "runs" / run / "tokens.parquet")
    info = json.loads((audit / "runs" / run / "run.json").read_text(encoding="utf-8"))
    scoring = info["resolved_config"]["scoring"]
    logprobs: dict[str, list[float]] = {}
    for sequence_id, logprob in zip(
        tokens["sequence_id"].to_pylist(), tokens["logprob"].to_pylist(), strict=True
    ):
        logprobs.setdefault(sequence_id, []).append(logprob)
    with output.open("w", encoding="utf-8") as file:
        for sequence in pq.read_table(audit / "trace.parquet").to_pylist():
            line = {
                "id": sequence["sequence_id"],
                "group_id": sequence["group_id"],
                "prompt_token_ids": sequence["prompt_token_ids"],
                "output_token_ids": sequence["output_token_ids"],
                # Seven digits: a float32 nearly to its last bit, in half the characters.
                "logprobs": [float(f"{x:.7g}") for x in logprobs[sequence["sequence_id"]]],
                "scoring": scoring,
            }
            if sequence["score_mask"] is not None:
                line["score_mask"] = sequence["score_mask"]
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a run of an audit as a rollout file.")
    parser.add_argument("audit", type=Path)
    parser.add_argument("output", type=Path, help="JSON lines")
    parser.add_argument("run", nargs="?", default="record")
    options = parser.parse_args()
    main(options.audit, options.output, options.run)

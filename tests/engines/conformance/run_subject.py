"""Runs the conformance suite on one engine, in the environment that this engine needs.

    python run_subject.py WORK_FOLDER

SUBJECT names the engine. Prints one line, `RESULT {...}`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from contract import Subject, examine  # type: ignore[import-not-found]


def subject(name: str, work: Path) -> Subject:
    """The engine of that name; each is imported where it is asked for."""
    made: Subject
    if name == "reference":
        from subject_reference import ReferenceSubject  # type: ignore[import-not-found]

        made = ReferenceSubject(work)
    elif name == "vllm":
        from subject_vllm import VllmSubject  # type: ignore[import-not-found]

        made = VllmSubject(work)
    elif name == "sglang":
        from subject_sglang import SglangSubject  # type: ignore[import-not-found]

        made = SglangSubject(work)
    else:
        from subject_transformers import TransformersSubject  # type: ignore[import-not-found]

        made = TransformersSubject(work, name.removeprefix("transformers "))
    return made


if __name__ == "__main__":
    print("RESULT " + json.dumps(examine(subject(os.environ["SUBJECT"], Path(sys.argv[1])))), flush=True)

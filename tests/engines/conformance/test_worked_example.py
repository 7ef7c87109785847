"""The example in docs/adding-an-engine.md is a whole engine with its adapter, and passes the suite it speaks of."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_the_page_is_a_working_example(repository_root: Path, tmp_path: Path) -> None:
    page = (repository_root / "docs" / "adding-an-engine.md").read_text(encoding="utf-8")
    pieces = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(pieces) == 3
    future = "from __future__ import annotations\n"
    run = 'import json\nfrom contract import examine\nprint("RESULT " + json.dumps(examine(ShelfSubject())))\n'
    program = tmp_path / "shelf.py"
    program.write_text("\n".join([future, *pieces, run]), encoding="utf-8")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(repository_root), str(HERE))),
        "KVATLAS_DIR": str(tmp_path / "maps"),
    }
    finished = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    report = json.loads(finished.stdout.rpartition("RESULT ")[2])
    assert set(report["rules"]) == {"partition", "references", "owners", "requests", "faults"}
    assert {rule: found["broken"] for rule, found in report["rules"].items()} == {rule: [] for rule in report["rules"]}
    assert report["rules"]["owners"]["looked"] > 100
    assert all(report["noticed"].values())
    assert report["answers"] == 20

"""Reads a Dockerfile and does its steps in a bare root, as a builder would: each stage a layer over its parent.

For root, in a mount namespace of its own. What is not understood is an error, so that no step is left out silently.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction, with its continuation lines joined."""

    word: str
    text: str

    def options(self) -> tuple[dict[str, str], str]:
        """Flags in front, and the rest."""
        found, rest = {}, self.text
        while match := re.match(r"--([\w-]+)=(\S+)\s+", rest):
            found[match[1]] = match[2]
            rest = rest[match.end() :]
        return found, rest

    def words(self) -> list[str]:
        """A JSON list as it is, else the words."""
        _, rest = self.options()
        return [str(one) for one in json.loads(rest)] if rest.startswith("[") else shlex.split(rest)


@dataclass(frozen=True, slots=True)
class Stage:
    """What stands between two FROMs."""

    name: str
    parent: str
    steps: tuple[Step, ...]


@dataclass(slots=True)
class Image:
    """A stage that was built: folders from the uppermost to the bare root, and how it is run."""

    layers: list[Path]
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)


def parse(text: str) -> dict[str, Stage]:
    """Stages by name, with the arguments in front of the first FROM put in."""
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    name, parent, steps = "", "", list[Step]()
    lines = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    for line in (one.strip() for one in lines.splitlines() if one.strip()):
        word, _, rest = line.partition(" ")
        if word == "ARG" and not stages and not name:
            key, _, value = rest.partition("=")
            arguments[key] = value
        elif word == "FROM":
            if name:
                stages[name] = Stage(name, parent, tuple(steps))
            parent, _, name = VARIABLE.sub(lambda found: arguments[found[1]], rest).partition(" AS ")
            name, steps = name or "last", []
        else:
            steps.append(Step(word, rest.strip()))
    stages[name] = Stage(name, parent, tuple(steps))
    return stages


class Builder:
    """Builds stages in `work`, which lies on a file system that an overlay can write to."""

    def __init__(
        self,
        stages: Mapping[str, Stage],
        context: Path,
        ignore: str,
        work: Path,
        bare: Iterable[Path],
        *,
        mounts: Iterable[Path] = (),
        environment: Mapping[str, str],
    ) -> None:
        """`bare` are the layers that stand for any parent that is no stage, uppermost first; `mounts` are folders of
        this machine that every step may read, and `environment` what it is given besides the image's own."""
        self._stages, self._context, self._work = stages, context, work
        self._wanted = [line[1:].strip() for line in ignore.splitlines() if line.startswith("!")]
        self._unwanted = [line for line in ignore.splitlines() if line.startswith("**/")]
        self._bare, self._mounts, self._environment = list(bare), list(mounts), dict(environment)
        self._built: dict[str, Image] = {}

    def build(self, name: str) -> Image:
        """The image of a stage, with all that it needs built before. Raises CalledProcessError where a step fails."""
        if name in self._built:
            return self._built[name]
        stage = self._stages[name]
        if stage.parent in self._stages:
            above = self.build(stage.parent)
            image = Image([*above.layers], {**above.environment}, above.folder, above.user)
        else:
            image = Image([*self._bare], {"PATH": PATH})
        upper = self._work / name
        upper.mkdir()
        image.layers.insert(0, upper)
        for step in stage.steps:
            self._do(step, image)
        self._built[name] = image
        return image

    def _do(self, step: Step, image: Image) -> None:
        match step.word:
            case "RUN":
                self._run(step.text, image)
            case "COPY":
                self._copy(step, image)
            case "WORKDIR":
                image.folder = step.text
                (image.layers[0] / step.text.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "ENV":
                image.environment.update(dict(one.split("=", 1) for one in shlex.split(step.text)))
            case "USER":
                image.user = step.text
            case "EXPOSE":
                image.ports.append(int(step.text))
            case "ENTRYPOINT":
                image.entrypoint = step.words()
            case "CMD":
                image.command = step.words()
            case "HEALTHCHECK":
                _, rest = step.options()
                image.health = Step("CMD", rest.removeprefix("CMD ")).words()
            case _:
                raise ValueError(f"{step.word} is not done here")

    def _run(self, command: str, image: Image) -> None:
        merged = mount_overlay(image.layers, self._work / "merged", self._work / "overlay")
        for name in ("dev", "proc"):
            subprocess.run(["mount", "--rbind", f"/{name}", merged / name], check=True)
        for path in self._mounts:
            inside = merged / str(path).lstrip("/")
            inside.mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "--bind", "-o", "ro", path, inside], check=True)
        environment = {"HOME": "/root", "DEBIAN_FRONTEND": "noninteractive", **self._environment, **image.environment}
        assert image.user == "0:0", "steps of a build run as root"
        script = f"cd {shlex.quote(image.folder)} && {command}"
        try:
            done = subprocess.run(
                [
                    "chroot",
                    merged,
                    "/usr/bin/env",
                    "-i",
                    *(f"{k}={v}" for k, v in environment.items()),
                    "sh",
                    "-c",
                    script,
                ],
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            subprocess.run(["umount", "--recursive", "--lazy", merged], check=True)
        if done.returncode != 0:
            raise RuntimeError(f"RUN {command[:200]}: {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")

    def _copy(self, step: Step, image: Image) -> None:
        options, rest = step.options()
        *sources, target = shlex.split(rest)
        into = image.layers[0] / os.path.join(image.folder, target).lstrip("/")
        layers = self.build(options["from"]).layers if "from" in options else [self._context]
        for source in sources:
            if "from" not in options and not any(source == one or source.startswith(f"{one}/") for one in self._wanted):
                raise ValueError(f"COPY {source}: the .dockerignore leaves it out")
            there = [layer / source.lstrip("/") for layer in layers]
            if not any(found.exists() for found in there):
                raise ValueError(f"COPY {source}: there is no such file")
            for found in reversed(there):  # from the bare root up, so that what is above wins
                if found.is_dir():
                    shutil.copytree(found, into, symlinks=True, dirs_exist_ok=True, ignore=self._ignored)
                elif found.is_file():
                    folder = into if target.endswith("/") else into.parent
                    folder.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(found, into / found.name if target.endswith("/") else into)

    def _ignored(self, folder: str, names: list[str]) -> list[str]:
        return [name for name in names if any(fnmatch(name, pattern.removeprefix("**/")) for pattern in self._unwanted)]


def mount_overlay(layers: list[Path], merged: Path, scratch: Path) -> Path:
    """The layers as one file system at `merged`, whose changes go into the uppermost."""
    merged.mkdir(exist_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    lower = ":".join(map(str, layers[1:]))
    options = f"lowerdir={lower},upperdir={layers[0]},workdir={scratch}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, merged], check=True)
    return merged

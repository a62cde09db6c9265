"""A long computation in stages: a file with its state, and at the end a picture and a record.

A record always belongs to the picture beside it: it is deleted before the picture is replaced.
"""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from isda.experiments.errors import InputError, TimeUp, reason
from isda.experiments.files import read_bytes, write_json, writing
from isda.experiments.settings import Options
from isda.experiments.training.deadline import Deadline
from isda.experiments.training.progress import show_progress
from isda.experiments.training.run_folder import read_checkpoint, replace_checkpoint

__all__ = ["Stages"]

_LARGEST = 2**20  # bytes of a record


class _Stateful(Protocol):
    """A module, an optimizer, or anything else with a state."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and strings in dictionaries and lists."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Copy what :meth:`state_dict` has returned."""


class Stages:
    """Runs the iterations of one stage after another; an interrupted stage can be resumed exactly.

    Args:
        folder: folder of the files NAME.pt, with the state, NAME.png, the picture, and NAME.json,
            the record. Hold its lock, see :mod:`isda.experiments.training.locks`.
        name: name of the files.
        arguments: what the result depends on, including ``settings`` as a dictionary. A state or
            record with other arguments is not continued.
        options: options, of which resume, checkpoint_seconds and minutes are used.
        shown: further entries of the record, such as paths, which are not compared.
    """

    record: dict[str, Any] | None = None
    """Result of an earlier command with the same arguments, if its work is to be resumed."""

    def __init__(
        self,
        folder: Path,
        name: str,
        arguments: Mapping[str, Any],
        options: Options,
        *,
        shown: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._arguments = json.loads(json.dumps(arguments))  # as in the files: no tuples
        self._folder, self._name = folder, name
        self._state, self._picture, self._record = (
            folder / f"{name}.{kind}" for kind in ("pt", "png", "json")
        )
        self._options, self._shown = options, shown
        self._stages: dict[str, dict[str, Any]] = {}  # iterations done, and parts
        self._deadline, self._saved_at = Deadline(options), time.monotonic()
        if self._state.exists():
            if not options.resume:
                raise InputError(f"{self._state} is unfinished: use --resume or a different --out")
            self._stages = self._read(self._state, _read_state)["stages"]
        elif options.resume and self._record.exists() and self._picture.exists():
            self.record = self._read(self._record, _read_json)

    def is_finished(self, name: str, total: int) -> bool:
        """Whether all iterations of a stage have been done."""
        return bool(self._stages.get(name, {}).get("done") == total)

    def run(
        self,
        name: str,
        total: int,
        step: Callable[[int, int], None],
        parts: Mapping[str, _Stateful],
        *,
        helpers: Mapping[str, _Stateful] = MappingProxyType({}),
        size: Callable[[int], int] = lambda done: 1,
    ) -> None:
        """Do the iterations of a stage that are left.

        Args:
            name: name of the stage.
            total: number of its iterations.
            step: called with the number of iterations done, and of those to do.
            parts: what the iterations change and later stages need.
            helpers: what else the iterations change; discarded at the end of the stage.
            size: function from the number of iterations done to the number to do next.

        Raises:
            TimeUp: the time limit was reached before; the state is written.
        """
        done = self._restore(name, total, parts, helpers)
        with show_progress(total, name, "iteration", first=done) as bar:
            while done < total:
                began, number = time.monotonic(), size(done)
                step(done, number)
                done += number
                bar.update(number)
                each, finished = (time.monotonic() - began) / number, done == total
                stop = not finished and self._deadline.is_up(each * size(done))
                changed = parts if finished else {**parts, **helpers}
                self._keep(name, done, changed, finished=finished, stop=stop)
                if stop:
                    raise TimeUp(
                        f"time limit of {self._options.minutes:g} min reached, {done} of {total} "
                        f"iterations of {name} done"
                    )

    def end(self, result: Mapping[str, Any], draw: Callable[[Path], object]) -> dict[str, Any]:
        """Write picture and record, and return the record: ``shown``, arguments and result.

        Args:
            result: numbers, strings and None in dictionaries and lists.
            draw: writes the picture to a path.
        """
        record = {**self._shown, **self._arguments, **result}
        with writing(self._record):
            self._record.unlink(missing_ok=True)
        draw(self._picture)
        write_json(self._record, record)
        self.clear()
        return record

    def clear(self) -> None:
        """Delete the state, and temporary files of a process that was killed."""
        left = self._folder.glob(f".{self._name}.*.new")
        for path in (self._state, self._state.with_suffix(".new.pt"), *left):
            path.unlink(missing_ok=True)

    def _restore(
        self,
        name: str,
        total: int,
        parts: Mapping[str, _Stateful],
        helpers: Mapping[str, _Stateful],
    ) -> int:
        """Load the parts of a stage; return the number of iterations done."""
        if name not in self._stages:
            return 0
        try:
            done, saved = self._stages[name]["done"], self._stages[name]["parts"]
            if not 0 < done <= total:
                raise ValueError(f"{done} iterations of {name}")
            for key, part in (parts if done == total else {**parts, **helpers}).items():
                part.load_state_dict(saved[key])
            return int(done)
        except Exception as error:  # a damaged file can fail in any way
            raise self._damage(self._state, error) from error

    def _keep(
        self, name: str, done: int, parts: Mapping[str, _Stateful], *, finished: bool, stop: bool
    ) -> None:
        """Write the state if the stage stops here, or if it is time to."""
        due = time.monotonic() - self._saved_at > self._options.checkpoint_seconds
        if not (finished or stop or due):
            return
        state = {key: part.state_dict() for key, part in parts.items()}
        self._stages[name] = {"done": done, "parts": state}
        if stop or due:
            replace_checkpoint(self._state, {"arguments": self._arguments, "stages": self._stages})
            self._saved_at = time.monotonic()

    def _read(self, path: Path, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """The state or the record of the same arguments."""
        try:
            found = read(path)
            before, now = _flat(found.get("arguments", found)), _flat(self._arguments)
            # an earlier version may have had fewer arguments
            changed = [f"{key} {before.get(key, 'unknown')!r} → {now[key]!r}" for key in now
                       if key not in before or before[key] != now[key]]  # fmt: skip
        except InputError:
            raise
        except Exception as error:  # a damaged file can fail in any way
            raise self._damage(path, error) from error
        if changed:
            raise InputError(
                f"{path} was made with other settings ({', '.join(changed)}): use these or a "
                "different --out"
            )
        return found

    def _damage(self, path: Path, error: Exception) -> InputError:
        return InputError(f"{path} is damaged ({reason(error)}): delete it to start again")


def _read_state(path: Path) -> dict[str, Any]:
    found = read_checkpoint(path)
    return {**found, "stages": {name: {**stage} for name, stage in found["stages"].items()}}


def _read_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(read_bytes(path, most=_LARGEST))
    return found


def _flat(arguments: Mapping[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in arguments.items() if key != "settings"}
    return {**rest, **arguments["settings"]}

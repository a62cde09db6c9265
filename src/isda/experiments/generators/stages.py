"""A long computation in stages: its state in a file until it is finished, then its record."""

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
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
    """Runs the iterations of one stage after the other, each of which can be continued exactly.

    Args:
        folder: folder of the files NAME.pt, with the state, and NAME.json, the record.
        name: name of the files.
        arguments: what the result depends on, with ``settings`` as a dictionary in it. A state or
            record of other arguments is not continued.
        options: resume, checkpoint_seconds and minutes count.
        progress: show progress bars.
    """

    record: dict[str, Any] | None = None
    """What an earlier command has found with the same arguments, if its work is to be resumed."""

    def __init__(
        self,
        folder: Path,
        name: str,
        arguments: Mapping[str, Any],
        options: Options,
        *,
        progress: bool = True,
    ) -> None:
        self._arguments = json.loads(json.dumps(arguments))  # as in the files: no tuples
        self._state, self._record = folder / f"{name}.pt", folder / f"{name}.json"
        self._options, self._progress = options, progress
        self._stages: dict[str, dict[str, Any]] = {}  # iterations done, and parts
        self._deadline, self._saved_at = Deadline(options), time.monotonic()
        with writing(folder, keep=()):
            folder.mkdir(parents=True, exist_ok=True)
        if self._state.exists():
            if not options.resume:
                raise InputError(f"{self._state} is unfinished: use --resume or a different --out")
            self._stages = self._read(self._state, read_checkpoint)["stages"]
        elif options.resume and self._record.exists():
            self.record = self._read(self._record, _read_json)

    def run(
        self,
        name: str,
        sizes: Sequence[int],
        step: Callable[[int, int], None],
        parts: Mapping[str, _Stateful],
    ) -> None:
        """Do the iterations of a stage that are left.

        Args:
            name: name of the stage.
            sizes: numbers of iterations to do at a time.
            step: called with the number of iterations done, and of those to do.
            parts: all that the iterations change.

        Raises:
            TimeUp: the time limit ended before; the state is written.
        """
        ends = [0, *itertools.accumulate(sizes)]
        done, total = self._restore(name, parts), ends[-1]
        if done not in ends:
            raise self._damage(self._state, ValueError(f"{done} iterations of {name}"))
        with show_progress(total, name, "iteration", first=done, show=self._progress) as bar:
            for size in sizes[ends.index(done) :]:
                began = time.monotonic()
                step(done, size)
                done += size
                bar.update(size)
                self._keep(name, done, total, parts, seconds=time.monotonic() - began)

    def end(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Write the record, which is the arguments and the result, and return it."""
        record = {**self._arguments, **result}
        write_json(self._record, record)
        self._state.unlink(missing_ok=True)
        return record

    def _restore(self, name: str, parts: Mapping[str, _Stateful]) -> int:
        """Load the parts of a stage; return the number of iterations done."""
        if name not in self._stages:
            return 0
        try:
            saved = self._stages[name]
            for key, part in parts.items():
                part.load_state_dict(saved["parts"][key])
            return int(saved["done"])
        except Exception as error:  # a damaged file can fail in any way
            raise self._damage(self._state, error) from error

    def _keep(
        self, name: str, done: int, total: int, parts: Mapping[str, _Stateful], *, seconds: float
    ) -> None:
        """Write the state if it is time to; ``seconds`` is the time of the last iterations."""
        finished = done == total
        stop = not finished and self._deadline.is_up(seconds)
        due = time.monotonic() - self._saved_at > self._options.checkpoint_seconds
        if not (finished or stop or due):
            return
        state = {key: part.state_dict() for key, part in parts.items()}
        self._stages[name] = {"done": done, "parts": state}
        if stop or due:
            replace_checkpoint(self._state, {"arguments": self._arguments, "stages": self._stages})
            self._saved_at = time.monotonic()
        if stop:
            raise TimeUp(
                f"time limit of {self._options.minutes:g} min reached, {done} of {total} "
                f"iterations of {name} done"
            )

    def _read(self, path: Path, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """The state or the record of the same arguments."""
        try:
            found = read(path)
            before, now = _flat(found.get("arguments", found)), _flat(self._arguments)
            changed = [f"{key} {before[key]!r} → {now[key]!r}" for key in now
                       if before[key] != now[key]]  # fmt: skip
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


def _read_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(read_bytes(path, most=_LARGEST))
    return found


def _flat(arguments: Mapping[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in arguments.items() if key != "settings"}
    return {**rest, **arguments["settings"]}

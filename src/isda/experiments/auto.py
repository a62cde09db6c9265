"""``isda compare --lambda-0 auto``: choose λ₀ on held-out images, then compare on the test set."""

import json
from dataclasses import replace
from pathlib import Path

from isda import distributed
from isda.experiments.files import write_text
from isda.experiments.plans import AutoComparison, Planned
from isda.experiments.report.intervals import RESOLUTION
from isda.experiments.report.text import show
from isda.experiments.search import (
    Choice,
    Round,
    checked_candidates,
    choice_record,
    choice_table,
    choose,
    default_hold_out,
    halving,
)
from isda.experiments.training.run_folder import require_free

__all__ = ["choose_lambda_0", "plan_words", "tie_words"]


def choose_lambda_0(
    task: AutoComparison, *, records: Path | None = None
) -> tuple[Planned, Choice | None]:
    """Choose λ₀ by successive halving; call it on all ranks, inside ``join_processes``.

    Prints the plan before it starts, and the errors of the candidates.

    Args:
        task: what to compare, and how to run the training.
        records: folder of finished runs, which are not trained again.

    Returns:
        The runs of the comparison on all images, and on rank 0 the runs of the search.
    """
    options = task.options
    candidates = checked_candidates(task.candidates, task.recipe)
    hold_out = task.recipe.hold_out or default_hold_out(task.recipe, options)
    rounds = halving(len(candidates), task.recipe.epochs)
    if not options.resume:  # find existing runs of the comparison now, not after the search
        for lambda_0 in candidates:
            plans = task.planned(lambda_0).plans()
            require_free(options.out / plan.name / str(plan.seed) for plan in plans)
    if distributed.rank(None) == 0:
        show(plan_words(task, candidates, hold_out, rounds))
    recipe = replace(task.recipe, hold_out=hold_out)
    best, choice = choose(recipe, candidates, rounds, task.named, options, records=records)
    planned = task.planned(best)
    if choice is not None:
        write_text(
            _record_path(planned), json.dumps(choice_record(choice, options.out), indent=2) + "\n"
        )
        show(f"\n{choice_table(choice)}\n{tie_words(choice)}")
    return planned, choice


def plan_words(
    task: AutoComparison, candidates: tuple[float, ...], hold_out: int, rounds: list[Round]
) -> str:
    """What will be trained, and how many epochs it takes."""
    few = f"; one of them is {100 / hold_out:.2g} points of error" if hold_out < 100 else ""
    lines = [f"λ₀ is chosen on {hold_out} training images, which are held out for it{few}:"]
    listed = " ".join(f"{lambda_0:g}" for lambda_0 in candidates)
    for number, part in enumerate(rounds, 1):
        which = listed if number == 1 else f"the best {part.candidates} of them"
        lines.append(
            f"  round {number}: {which}, {_size(part.epochs, part.seeds)}, {part.cost} in all"
        )
    search = sum(part.cost for part in rounds)
    compared = 2 * task.recipe.epochs * len(task.seeds)
    size = _size(task.recipe.epochs, task.seeds)
    lines.append(f"  then: cross entropy and ISDA, {size}, {compared} in all")
    share = 100 * search / compared
    lines.append(f"The search takes {search} epochs, {share:.0f} % of those of the comparison.")
    return "\n".join(lines)


def tie_words(choice: Choice) -> str:
    """Line about candidates with the same error as the chosen one; empty if there are none."""
    error = choice.chosen.error.mean
    equal = [trial for trial in choice.rounds[-1] if abs(trial.error.mean - error) < RESOLUTION]
    if len(equal) < 2:
        return ""
    values = sorted(trial.recipe.lambda_0 for trial in equal)
    *most, last = (f"{value:g}" for value in values)
    return f"{', '.join(most)} and {last} have the lowest error: the smallest is chosen.\n"


def _size(epochs: int, seeds: tuple[int, ...]) -> str:
    many = f"seeds {' '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    return f"{epochs} epochs, {many}"


def _record_path(planned: Planned) -> Path:
    """File for the rounds of the search, beside the folders of the runs."""
    return planned.options.out / f"{list(planned.recipes)[1]}.lambda_0.json"

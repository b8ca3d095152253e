"""`AdaptiveTrainer`: the one obvious call."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from adaptive_trainer import checkpoints, memory, portrait
from adaptive_trainer.arguments import check_arguments
from adaptive_trainer.crash import Mark
from adaptive_trainer.data import Source
from adaptive_trainer.data_checks import refuse_used_up
from adaptive_trainer.engines.base import Task
from adaptive_trainer.errors import RecipeError
from adaptive_trainer.evaluation import Evaluation
from adaptive_trainer.events import Event, Finish, Start
from adaptive_trainer.goal import Goal
from adaptive_trainer.journal import JOURNAL_NAME, Journal, hook_of
from adaptive_trainer.ladder import Ladder
from adaptive_trainer.loop import Loop
from adaptive_trainer.objective import Objective
from adaptive_trainer.phases import Track
from adaptive_trainer.plan import Plan
from adaptive_trainer.progress import Progress
from adaptive_trainer.ranks import alone
from adaptive_trainer.recipe import Recipe, load_recipe
from adaptive_trainer.result import FitResult
from adaptive_trainer.run import Run
from adaptive_trainer.signals import Signals
from adaptive_trainer.streams import seed_everything
from adaptive_trainer.trackers import Trackers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from adaptive_trainer.saving import Opened


log = logging.getLogger("adaptive_trainer")


class AdaptiveTrainer:
    """Trains a model through out-of-memory: the same optimizer step again, one rung lower, nothing lost.

    Args:
        model: A module, or a function without arguments that makes one; loading is then protected too.
        data: A `Dataset`, a `DataLoader`, or any iterable of batches.
        loss: ``callable(output, targets)`` that gives a tensor with one element. None: the model's output carries the
            loss (``.loss``, ``["loss"]``), or is it.
        step: ``callable(model, batch)`` that gives the loss, or loss and weight, in place of calling model and loss.
        optimizer: A torch optimizer over the model's parameters, or a function from parameters to one.
            None: AdamW with a learning rate of 1e-3.
        scheduler: A function from the optimizer to a learning-rate schedule, stepped once per optimizer step.
        batch_size: Samples per optimizer step over all processes. Needed for a data set, refused for a loader.
        epochs: How many passes over the data; one if neither this nor ``steps`` is given.
        steps: How many optimizer steps; with ``epochs`` too, the first reached ends the run.
        shuffle: Whether a data set's order is drawn anew for each epoch, from ``seed``.
        collate_fn: Puts a data set's samples together, as `DataLoader` takes it.
        num_workers: Processes that read a data set, as `DataLoader` takes it.
        eval_data: Evaluated at the end of each epoch, or every ``eval_steps`` optimizer steps.
        eval_steps: See ``eval_data``.
        max_grad_norm: Common norm to which gradients are clipped, once per optimizer step. None clips nothing.
        reduction: What the loss does over its items: ``"mean"`` or ``"sum"``.
        weight: ``callable(batch)`` that counts the items which the loss averages over. Default: valid labels, else
            samples.
        separable: False where the loss couples the samples of a batch, which is then never cut.
        plan: Where the walk begins. Default: the whole batch in fp32.
        ladder: Rungs, in order: names, `Rung` objects or functions; or a `Ladder`. An empty list turns it off.
        memory_limit: ``"20GiB"``, bytes, or a fraction of the device such as 0.9.
        device: Default: the accelerator there is, else the CPU.
        seed: Seeds Python, NumPy and torch once, when a run starts from its first step.
        run_dir: Folder for the journal; None writes nothing.
        resume: ``"auto"`` goes on from the newest good checkpoint in ``run_dir`` if there is one, ``"never"`` moves
            those that are there aside, ``"must"`` refuses to start without one.
        checkpoint_steps: Optimizer steps between checkpoints, beside those at the end of each epoch and of the run.
        keep_checkpoints: How many checkpoints stay in ``run_dir``.
        callbacks: Callables that take an event, or objects with ``on_event(event)``.
        trackers: Names of trackers that accelerate knows, such as ``"tensorboard"``.
        progress: Progress bar: None shows one when standard error is a terminal.
        metrics: Further functions ``(output, targets)`` for evaluation, by name, each the mean over what it is given.

    Raises:
        RecipeError: Arguments are wrong; all mistakes at once.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        data: Any,
        *,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        step: Callable[[nn.Module, Any], Any] | None = None,
        optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
        scheduler: Callable[[Optimizer], Any] | None = None,
        batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        eval_data: Any = None,
        eval_steps: int | None = None,
        max_grad_norm: float | None = None,
        reduction: str = "mean",
        weight: Callable[[Any], float] | None = None,
        separable: bool = True,
        plan: Plan | None = None,
        ladder: Ladder | Sequence[Any] | None = None,
        memory_limit: str | float | None = None,
        device: str | torch.device | None = None,
        seed: int = 0,
        run_dir: str | Path | None = None,
        resume: str = "auto",
        checkpoint_steps: int | None = None,
        keep_checkpoints: int = 2,
        callbacks: Sequence[Any] = (),
        trackers: Sequence[str] = (),
        progress: bool | None = None,
        metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    ) -> None:
        given = {key: value for key, value in locals().items() if key != "self"}
        mistakes = check_arguments(given)
        if mistakes:
            raise RecipeError(mistakes)
        self._model = model
        self._data = data
        self._eval_data = eval_data
        self._loading: dict[str, Any] = {
            "batch_size": batch_size, "collate_fn": collate_fn, "num_workers": num_workers, "seed": seed,
        }  # fmt: skip
        self._shuffle = shuffle
        self._goal = Goal(steps, epochs if steps is not None or epochs is not None else 1)
        self._eval_steps = eval_steps
        self._seed = seed
        self._hooks = [hook_of(callback) for callback in callbacks]
        self._trackers = tuple(trackers)
        self._progress = progress
        self._run_dir = None if run_dir is None else Path(run_dir)
        self._journal_path = None if self._run_dir is None else self._run_dir / JOURNAL_NAME
        self._device = memory.default_device() if device is None else memory.device_of(device)
        self._limit_bytes = memory.resolve_limit(memory_limit, self._device)
        budget = None if self._limit_bytes is None else memory.set_limit(self._device, self._limit_bytes)
        ranks = alone()
        task = Task(
            objective=Objective(loss=loss, step=step, weight=weight, reduction=reduction, metrics=metrics or {}),
            optimizer=optimizer,
            scheduler=scheduler,
            max_grad_norm=max_grad_norm,
            device=self._device,
            budget=budget,
            track=Track(rank=ranks.rank, guards=() if budget is None else (budget,)),
        )
        start = plan or Plan()
        self._loop = Loop(model, task, Ladder.of(ladder), start, self._record, separable=separable, ranks=ranks)
        self._evaluation = Evaluation(self._loop)
        self._journal = Journal()
        self._source: Source | None = None
        self._epochs = 0
        self._metrics: dict[str, float] = {}
        self._evaluated_at: int | None = None
        self._is_fitting = False
        self._recipe: Recipe | None = None
        self._run: Run | None = None
        self._resume = resume
        self._keeping: dict[str, Any] = {"every": checkpoint_steps, "keep": keep_checkpoints}

    @classmethod
    def from_recipe(cls, recipe: str | Path | Recipe, overrides: Sequence[str] = ()) -> Self:
        """The trainer that a recipe describes. With a ``run_dir``, `fit` leaves the recipe as it was meant there too.

        Args:
            recipe: A YAML file, or one that was loaded already.
            overrides: ``key=value`` texts that change entries of the file.

        Raises:
            RecipeError: The recipe is wrong; all mistakes at once.
        """
        if not isinstance(recipe, Recipe):
            recipe = load_recipe(recipe, overrides)
        trainer = cls(**recipe.arguments())
        trainer._recipe = recipe
        return trainer

    @property
    def model(self) -> nn.Module:
        """The user's own module. A model given as a function exists from the first ``fit`` or ``evaluate`` on.

        Raises:
            RecipeError: It does not exist yet.
        """
        if self._loop.workshop.state is not None:
            return self._loop.workshop.state.model
        if isinstance(self._model, torch.nn.Module):
            return self._model
        raise RecipeError("model: it was given as a function, which fit() calls; call fit() or evaluate() first")

    def fit(self) -> FitResult:
        """Train. Called again, it goes on for another ``steps`` or ``epochs`` from where it stands.

        Returns:
            How the run ended.

        Raises:
            LadderExhausted: Memory does not suffice under any plan that the ladder allows.
            DataError: The data cannot be trained on.
            NonFiniteError: Too many steps in a row were not finite.
        """
        started = time.perf_counter()
        loop = self._loop
        if self._source is None:
            self._source = Source(self._data, shuffle=self._shuffle, **self._loading)
        goal = self._goal.after(loop.track.step, self._epochs)
        again = goal.epochs is not None and goal.epochs > self._epochs + 1
        refuse_used_up("data", self._data, again=again)
        again = again or self._eval_steps is not None or (goal.epochs is None and not isinstance(self._data, Iterator))
        refuse_used_up("eval_data", self._eval_data, again=again)
        opened = checkpoints.found(self._run_dir, self._resume) if loop.track.step == 0 else None
        if loop.track.step == 0:
            seed_everything(self._seed)
            self._warn_of_unused_metrics()
        with ExitStack() as stack:
            stack.callback(loop.close)
            self._is_fitting = True
            stack.callback(setattr, self, "_is_fitting", False)
            self._journal = stack.enter_context(self._open_journal(stack, goal.total_steps(self._source.num_batches)))
            if opened is not None:
                self._take_up(opened, self._source)
            stack.enter_context(Mark(self._run_dir, loop, fresh=self._resume == "never" and loop.track.step == 0))
            self._start(self._source, None if opened is None else str(opened.path))
            signals = stack.enter_context(Signals(taken=self._run_dir is not None))
            keeping = checkpoints.Checkpoints(self._run_dir, loop, self._source, self._told, **self._keeping)
            stack.callback(keeping.close)
            run = Run(
                loop, self._source, goal, self._record,
                evaluate=self._evaluate_once, checkpoints=keeping, signals=signals, eval_steps=self._eval_steps,
            )  # fmt: skip
            self._run = run
            try:
                run.train(self._epochs)
            finally:
                self._epochs = run.epochs
            return self._finish(run, time.perf_counter() - started)

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Evaluate the model as it stands.

        Args:
            data: As ``eval_data``; None takes that.

        Returns:
            ``{"loss": ...}`` and the user's metrics, over all items of the data.

        Raises:
            RecipeError: There are no data.
            LadderExhausted: Not even the smallest micro-batch fits.
        """
        data = self._eval_data if data is None else data
        if data is None:
            raise RecipeError("eval_data: none was given; type evaluate(data), or give eval_data to the trainer")
        if self._loop.in_step:
            raise RecipeError("evaluate: a step is under way; call it for a step event, when that step is done")
        if self._is_fitting:
            return dict(self._evaluate(data))
        if self._loop.workshop.state is None:
            self._loop.workshop.load_apart(self._seed)
        with ExitStack() as stack:
            stack.callback(self._loop.close)
            self._journal = stack.enter_context(Journal(self._journal_path, self._hooks))
            return dict(self._evaluate(data))

    def _evaluate(self, data: Any) -> dict[str, float]:
        own = dict(self._loading)
        if own["batch_size"] is None and self._source is not None:
            own["batch_size"] = self._source.batch_size
        event = self._evaluation.run(Source.for_evaluation(data, beside=self._data, **own))
        self._record(event)
        if data is self._eval_data:
            self._metrics, self._evaluated_at = event.metrics, event.step
        return event.metrics

    def _evaluate_once(self) -> None:
        """Evaluate, unless that was done at this very step or there is nothing to evaluate on."""
        if self._eval_data is not None and self._evaluated_at != self._loop.track.step:
            self._evaluate(self._eval_data)

    # Checkpoints.

    def _take_up(self, opened: Opened, source: Source) -> None:
        self._loop.begin()
        told = portrait.resume(self._loop, source, opened.weights(), opened.rest, self._told().given)
        self._epochs, self._metrics, self._evaluated_at = told.epochs, told.metrics, told.evaluated_at

    def _told(self) -> portrait.Progress:
        epochs = self._epochs if self._run is None else self._run.epochs
        given = {"batch_size": None if self._source is None else self._source.batch_size, "seed": self._seed}
        return portrait.Progress(epochs, dict(self._metrics), self._evaluated_at, given)

    # What surrounds a run.

    def _record(self, event: Event) -> None:
        self._journal.record(event)

    def _warn_of_unused_metrics(self) -> None:
        if self._loop.task.objective.metrics and self._eval_data is None:
            log.warning("metrics: fit() evaluates nothing without eval_data; give it, or call evaluate(data)")

    def _open_journal(self, stack: ExitStack, total_steps: int | None) -> Journal:
        hooks: list[Callable[[Event], None]] = []
        bar = Progress.for_run(self._progress, total_steps, self._limit_bytes)
        if bar is not None:
            hooks.append(stack.enter_context(bar))
        if self._trackers:
            hooks.append(stack.enter_context(Trackers(self._trackers, self._run_dir)))
        if self._recipe is not None and self._run_dir is not None and self._loop.ranks.rank == 0:
            self._recipe.save(self._run_dir)
        return Journal(self._journal_path, [*hooks, *self._hooks])

    def _start(self, source: Source, resumed_from: str | None) -> None:
        loop = self._loop
        batch = None if source.batch_size is None else source.batch_size * loop.ranks.size
        self._record(
            Start(
                step=loop.track.step,
                rank=loop.ranks.rank,
                plan=loop.descent.plan,
                effective_batch=batch,
                num_processes=loop.ranks.size,
                resumed_from=resumed_from,
                num_rows=source.batch_size,
                smallest_piece=loop.traits().smallest_piece,
            )
        )

    def _finish(self, run: Run, seconds: float) -> FitResult:
        loop = self._loop
        result = FitResult.of(
            self._journal.events,
            steps=loop.track.step,
            epochs=run.epochs,
            plan=loop.descent.plan,
            metrics=dict(self._metrics),
            seconds=seconds,
            run_dir=self._run_dir,
        )
        self._record(
            Finish(
                step=result.steps,
                rank=loop.ranks.rank,
                plan=result.plan,
                loss=result.loss,
                seconds=seconds,
                peak_bytes=result.peak_bytes,
                num_fallbacks=len(result.fallbacks),
                num_rows=None if self._source is None else self._source.batch_size,
                smallest_piece=loop.traits().smallest_piece,
            )
        )
        return replace(result, events=tuple(self._journal.events))

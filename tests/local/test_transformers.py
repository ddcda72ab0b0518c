"""Uses transformers' Trainer without a job: pushes to a fake Hugging Face Hub, folders of ranks, and logs."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import asyncdist as ad
from asyncdist.integrations import joining
from protocols import DiLoCoPolicy, EvolutionStrategyPolicy, GossipPolicy

REPLACED = ("training_step", "log", "save_model", "_load_optimizer_and_scheduler")


def facts_of(method: Any) -> tuple[Any, ...]:
    return method.__name__, method.__module__, method.__doc__, inspect.signature(method), inspect.isroutine(method)


class Hub:
    """Records the repositories that are created, and the uploads to them."""

    def __init__(self) -> None:
        self.created: list[str] = []
        self.uploads: list[str] = []

    def create_repo(self, name: str, **_: Any) -> Any:
        self.created.append(name)
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, *, repo_id: str, **_: Any) -> Any:
        self.uploads.append(repo_id)
        return SimpleNamespace(done=lambda: True)


class Model(torch.nn.Module):
    """Has a forward pass, which the Trainer's constructor inspects."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.net(inputs).square().mean()}


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_of_a_trainer_pushes_to_the_hub(
    rank: int, given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: all ranks pushed to one repository, and a push after the training went to a repository "rank0"."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(joining, "hide_ranks", lambda: None)  # importing the integration would hide this process's rank
    monkeypatch.setattr(joining, "_logged", set())
    integration = importlib.import_module("asyncdist.integrations.transformers")
    monkeypatch.setattr(joining, "join", lambda: SimpleNamespace(rank=rank, size=2))
    hub = Hub()
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub, raising=False)
    for name in ("create_repo", "upload_folder"):  # as in transformers 4
        monkeypatch.setattr(transformers.trainer, name, getattr(hub, name), raising=False)

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "mine"), use_cpu=True, report_to=[], push_to_hub=given
    )
    averaging = integration.SelectiveAveraging(average_every=2)
    trainer = transformers.Trainer(Model(), arguments, callbacks=[averaging])
    monkeypatch.setattr(trainer, "create_model_card", lambda **_: None)  # the hub's client would check it online
    trainer.push_to_hub()
    trainer.save_model(checkpoint := str(tmp_path / "checkpoint-1"), _internal_call=True)
    trainer._push_from_checkpoint(checkpoint)

    assert hub.created == (["mine"] if rank == 0 else [])
    assert hub.uploads == (["me/mine"] * 2 if rank == 0 else [])
    assert caplog.text.count("only rank 0 pushes") == (1 if rank == 0 else 0)


def test_arguments_belong_to_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: ranks in one process, as in a notebook, that shared arguments all wrote to one rank's folder.

    A copy of arguments that a trainer had changed got the folder rank0/rank0.
    """
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(joining, "hide_ranks", lambda: None)
    integration = importlib.import_module("asyncdist.integrations.transformers")
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path / "mine"), use_cpu=True, report_to=[])

    def train(rank: int, given: Any) -> str:
        monkeypatch.setattr(joining, "join", lambda: SimpleNamespace(rank=rank, size=2))
        averaging = integration.SelectiveAveraging(average_every=2)
        return str(transformers.Trainer(Model(), given, callbacks=[averaging]).args.output_dir)

    folder = str(tmp_path / "mine" / "rank0")
    assert train(0, arguments) == folder
    assert train(0, arguments) == folder
    assert train(0, dataclasses.replace(arguments)) == folder
    with pytest.raises(ValueError, match="rank 1 must have its own TrainingArguments, got those of rank 0"):
        train(1, arguments)


@pytest.mark.slow
def test_rank_0_of_each_job_in_a_process_shows_its_progress(integration: Any, tmp_path: Path) -> None:
    """Regression: ranks that share a process printed no losses, and neither did any later trainer of the process."""
    import transformers

    def is_shown(world: ad.blocking.World) -> bool:
        arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
        averaging = integration.SelectiveAveraging(average_every=2)
        ad.blocking.barrier()  # all ranks have made their callbacks
        trainer = transformers.Trainer(Model(), arguments, callbacks=[averaging])
        return any(isinstance(each, transformers.ProgressCallback) for each in trainer.callback_handler.callbacks)

    for _ in range(2):
        assert ad.run_local(ad.blocking.hosted(is_shown), ranks=3) == [True, False, False]


@pytest.fixture
def integration(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the integration without hiding this process's rank, and restore what ranks change in the process."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(joining, "hide_ranks", lambda: None)
    monkeypatch.setattr(joining, "_logged", set())
    accelerate = sys.modules.get("asyncdist.integrations.accelerate")
    # importing accelerate, in another test, has patched the trainer's functions: they would open a world
    if accelerate is not None:
        monkeypatch.setattr(accelerate, "_world", lambda: SimpleNamespace(rank=0, size=1))
    return importlib.import_module("asyncdist.integrations.transformers")


def test_the_count_of_averages_is_logged_but_is_not_a_metric(
    integration: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a search by the sum of the metrics of evaluate() chose the trial with the fewest replacements."""
    import transformers

    monkeypatch.setattr(joining, "join", lambda: SimpleNamespace(rank=0, size=1))
    averaging = integration.SelectiveAveraging(average_every=2)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, label_names=["inputs"]
    )
    rows = [{"inputs": torch.ones(2)}]
    trainer = transformers.Trainer(Model(), arguments, eval_dataset=rows, callbacks=[averaging])
    averaging._training.replacement_count = 3
    with averaging._attached(trainer):
        metrics = trainer.evaluate()
    assert trainer.state.log_history[-1]["replacements"] == 3
    assert "eval_loss" in metrics and "replacements" not in metrics


def test_the_best_model_is_loaded_after_the_last_average(integration: Any, tmp_path: Path) -> None:
    """Regression: the average of eager anchors, with which the policy ends, changed the loaded best model."""
    import transformers
    from safetensors.torch import load_file

    def train(world: ad.blocking.World) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = Model()
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=7,
            per_device_train_batch_size=1,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="best",
            metric_for_best_model="eval_loss",
            greater_is_better=False,
            load_best_model_at_end=True,
            learning_rate=0.1,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            label_names=["inputs"],
        )
        averaging = integration.Averaging(DiLoCoPolicy, average_every=1, eager=True)
        rows = [{"inputs": torch.full((2,), 1.0 + world.rank)}] * 7
        trainer = transformers.Trainer(
            model, arguments, train_dataset=rows, eval_dataset=rows[:1], callbacks=[averaging]
        )

        def evaluate(*_: Any, **__: Any) -> dict[str, float]:
            # transformers 4.50 does not set this with save_strategy="best". Others end rounds in a last save.
            trainer.state.best_model_checkpoint = f"{trainer.args.output_dir}/checkpoint-2"
            return {"eval_loss": trainer.state.global_step}

        trainer.evaluate = evaluate  # type: ignore[method-assign]
        trainer.train()
        best = load_file(tmp_path / f"rank{world.rank}" / "checkpoint-2" / "model.safetensors")
        return dict(model.state_dict()), best

    for own, best in ad.run_local(ad.blocking.hosted(train), ranks=2):
        assert own.keys() == best.keys()
        assert all(torch.equal(own[name], best[name]) for name in own)


def test_a_training_forgets_the_metric_of_an_earlier_one(
    integration: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a new trial of a search was first judged by the last evaluation of the previous trial's model."""
    import transformers

    from asyncdist.protocols.metrics import NOT_MEASURED

    monkeypatch.setattr(joining, "join", lambda: SimpleNamespace(rank=0, size=1))
    averaging = integration.SelectiveAveraging(average_every=2, monitor="eval_loss")
    monkeypatch.setattr(averaging._training, "begin", lambda model, optimizer: None)
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    averaging.on_evaluate(arguments, None, None, metrics={"eval_loss": 1.0})
    averaging.on_train_begin(arguments, None, None, model=None, optimizer=None)
    assert averaging._metric() is NOT_MEASURED
    averaging.on_evaluate(arguments, None, None, metrics={"eval_loss": 2.0})
    assert averaging._metric() == 2.0


class Saved(NamedTuple):
    """Files that a trainer has saved, the weights when it saved them, and those at the end."""

    names: list[str]
    saved: dict[str, torch.Tensor]
    live: dict[str, torch.Tensor]
    end: dict[str, torch.Tensor]


def saved_by(folder: Path, rank: int, averagings: list[Any], *, checkpoint: str | None = None, **options: Any) -> Saved:
    """Train four steps, save after two, and return the saved state."""
    import transformers
    from safetensors.torch import load_file

    class Note(transformers.TrainerCallback):
        live: dict[str, torch.Tensor]

        def on_save(self, args: Any, state: Any, control: Any, **of: Any) -> None:
            if state.global_step == 2:
                self.live = {name: tensor.clone() for name, tensor in of["model"].state_dict().items()}

    torch.manual_seed(0)
    model, note = Model(), Note()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=1,
        learning_rate=0.1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    rows = [{"inputs": torch.full((2,), 1.0 + rank)}] * 4
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[*averagings, note])
    trainer.train(resume_from_checkpoint=checkpoint)
    saved = folder / f"rank{rank}" / "checkpoint-2"
    names = sorted(each.name for each in saved.glob("asyncdist*"))
    live = {} if checkpoint else note.live
    return Saved(names, load_file(saved / "model.safetensors"), live, dict(model.state_dict()))


@pytest.mark.slow
def test_a_checkpoint_has_the_weights_of_the_policy_state(integration: Any, tmp_path: Path) -> None:
    """Regression: with eager=True, a checkpoint had the weights from before the anchors were averaged."""

    def train(world: ad.blocking.World) -> list[Saved]:
        return [
            saved_by(
                tmp_path / str(is_alone),
                world.rank,
                [integration.Averaging(DiLoCoPolicy, average_every=1, eager=True)],
                save_only_model=is_alone,
            )
            for is_alone in (False, True)
        ]

    for whole, alone in ad.run_local(ad.blocking.hosted(train), ranks=2):
        assert whole.names == ["asyncdist_policy_DiLoCoPolicy.pt"] and not alone.names
        for name, live in whole.live.items():
            assert torch.equal(whole.saved[name], live) and torch.equal(alone.saved[name], live)


@pytest.mark.slow
def test_a_callback_saves_an_averaging_like_its_policy(integration: Any, tmp_path: Path) -> None:
    """Regression: ``save_population`` raised AttributeError, because this ``Averaging`` has no state."""
    import transformers

    class Saver(transformers.TrainerCallback):
        def __init__(self, averaging: Any) -> None:
            self.averaging = averaging

        def on_step_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
            ad.blocking.save_population(tmp_path / "all", of["model"], of["optimizer"], policy=self.averaging)

    def train(world: ad.blocking.World) -> tuple[int, int]:
        averaging = integration.Averaging(DiLoCoPolicy, average_every=1, eager=True)
        saved_by(tmp_path, world.rank, [averaging, Saver(averaging)])
        other = Model()
        optimizer = torch.optim.AdamW([{"params": [each]} for each in other.parameters()])
        policy = DiLoCoPolicy(other, optimizer, average_every=1, eager=True)
        ad.blocking.load_population(tmp_path / "all", other, optimizer, policy=policy)
        with pytest.raises(ad.ClosedError, match="the trainer does not train, so no policy is open"):
            ad.blocking.save_population(tmp_path / "all", other, optimizer, policy=averaging)
        ad.blocking.load_population(tmp_path / "all", other, optimizer, policy=averaging)
        begun: list[int] = []

        class Watch(transformers.TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                begun.append(averaging.policy.iteration)

        saved_by(tmp_path, world.rank, [averaging, Watch()])
        return policy.iteration, begun[0]

    assert ad.run_local(ad.blocking.hosted(train), ranks=2, strict=True) == [(4, 4)] * 2


@pytest.mark.slow
def test_each_policy_of_a_trainer_has_its_own_state_file(integration: Any, tmp_path: Path) -> None:
    """Regression: the states of all policies had one file, so that a resumed training raised ValueError."""

    def averagings() -> list[Any]:
        named = [integration.Averaging(GossipPolicy, average_every=1, name=name) for name in ("a/b", "c")]
        return [integration.Averaging(DiLoCoPolicy, average_every=2), *named]

    def train(world: ad.blocking.World) -> tuple[Saved, Saved]:
        whole = saved_by(tmp_path, world.rank, averagings())
        checkpoint = str(tmp_path / f"rank{world.rank}" / "checkpoint-2")
        return whole, saved_by(tmp_path, world.rank, averagings(), checkpoint=checkpoint)

    for whole, resumed in ad.run_local(ad.blocking.hosted(train), ranks=2):
        kinds = ["DiLoCoPolicy", "GossipPolicy_a%2Fb", "GossipPolicy_c"]
        assert whole.names == [f"asyncdist_policy_{kind}.pt" for kind in kinds]
        assert all(torch.equal(whole.end[name], resumed.end[name]) for name in whole.end)


def test_the_state_file_of_earlier_versions_is_loaded(
    integration: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "join", lambda: SimpleNamespace(rank=0, size=1))
    torch.save({"policy": "GossipPolicy"}, tmp_path / "asyncdist_policy.pt")
    first, second = (integration.Averaging(kind, average_every=1) for kind in (DiLoCoPolicy, GossipPolicy))
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[first, second]))
    for each in (first, second):
        each._load_state(trainer, tmp_path)
    assert (first._training._saved, second._training._saved) == (None, {"policy": "GossipPolicy"})


def test_a_callback_cannot_be_copied(integration: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: deepcopy named an internal class, and pickle a lambda."""
    monkeypatch.setattr(joining, "join", lambda: SimpleNamespace(rank=0, size=1))
    averaging = integration.SelectiveAveraging(average_every=2)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"^SelectiveAveraging cannot be copied"):
            copied(averaging)


def test_a_replaced_method_looks_like_the_original(
    integration: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: during a training, the trainer's methods had no names, and deepcopy of one copied the callback."""
    import transformers

    monkeypatch.setattr(joining, "join", lambda: SimpleNamespace(rank=0, size=1))
    averaging = integration.SelectiveAveraging(average_every=2)
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    trainer = transformers.Trainer(Model(), arguments, callbacks=[averaging])
    before = {name: facts_of(getattr(trainer, name)) for name in REPLACED}
    with averaging._attached(trainer):
        assert set(REPLACED) <= vars(trainer).keys()
        assert {name: facts_of(getattr(trainer, name)) for name in REPLACED} == before
        assert copy.deepcopy(trainer.log) is trainer.log
    assert not set(REPLACED) & vars(trainer).keys()


def test_a_policy_that_trains_the_model_is_refused(integration: Any) -> None:
    """Regression: the trainer's optimizer moved each rank's model in addition to the policy's steps."""
    with pytest.raises(ValueError, match=r"^policy must be .*this policy's steps train the model instead"):
        integration.Averaging(EvolutionStrategyPolicy, sigma=0.1)


@pytest.mark.slow
def test_a_resumed_training_continues_the_logged_count(integration: Any, tmp_path: Path) -> None:
    """Regression: the logged number of averages restarted at 0, although the trainer's log continued."""

    def train(world: ad.blocking.World) -> list[int]:
        counts = []
        for checkpoint in (None, str(tmp_path / f"rank{world.rank}" / "checkpoint-2")):
            averaging = integration.Averaging(DiLoCoPolicy, average_every=1)
            saved_by(tmp_path, world.rank, [averaging], checkpoint=checkpoint)
            counts.append(averaging._training.replacement_count)
        return counts

    assert ad.run_local(ad.blocking.hosted(train), ranks=2) == [[4, 4]] * 2

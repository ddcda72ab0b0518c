"""Resumes trainings of Lightning, with ranks in one process."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import asyncdist as ad
from asyncdist.protocols.metrics import NOT_MEASURED
from asyncdist.simulation import Kill, Network, Restart, simulate
from protocols import DiLoCoPolicy, GossipPolicy

ROWS, BATCH, SAVED_AFTER = 16, 2, 3


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Restore the settings of the process that callbacks of ranks other than 0 change."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    with warnings.catch_warnings():
        yield
    logger.setLevel(level)


def rows_read(folder: Path, checkpoint: Path | None) -> list[int]:
    """Train two epochs, possibly from a checkpoint, and return the rows in the order of reading."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from asyncdist.integrations.lightning import SelectiveAveraging

    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    read: list[int] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            read.extend(batch[0].tolist())
            return self.net(batch[0][:, None].float()).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    torch.manual_seed(0)
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED_AFTER, save_top_k=-1)
    trainer = pl.Trainer(
        max_epochs=2,
        devices=1,
        accelerator="cpu",
        callbacks=[SelectiveAveraging(average_every=1000), saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data: Any = stateful.StatefulDataLoader(TensorDataset(torch.arange(ROWS)), batch_size=BATCH, shuffle=True)
    trainer.fit(Module(), data, ckpt_path=checkpoint)
    return read


def linear(optimizer_class: Any = torch.optim.SGD) -> Any:
    """Return a module of Lightning with one weight, which is the same at each call."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(batch[0]).square().mean()

        def test_step(self, batch: Any, _: int) -> None:
            pass

        def configure_optimizers(self) -> Any:
            return optimizer_class(self.net.parameters(), lr=0.1)

    torch.manual_seed(0)
    return Module()


def quiet_trainer(callbacks: list[Any], **options: Any) -> Any:
    """Return a trainer that writes and prints nothing."""
    import lightning.pytorch as pl

    return pl.Trainer(
        devices=1,
        accelerator="cpu",
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


@pytest.mark.filterwarnings("ignore")  # Lightning and torchdata warn of their own calls
def test_only_the_own_checkpoint_has_the_order_of_rows(tmp_path: Path) -> None:
    """Regression: ranks that resumed from one checkpoint read the same rows, with StatefulDataLoader."""
    pytest.importorskip("lightning.pytorch")

    def train(world: ad.blocking.World) -> tuple[list[int], list[int], list[int]]:
        name = f"step={SAVED_AFTER}.ckpt"
        whole = rows_read(tmp_path / "whole", None)
        own = rows_read(tmp_path / "own", tmp_path / "whole" / f"rank{world.rank}" / name)
        ad.blocking.barrier()
        return whole, own, rows_read(tmp_path / "shared", tmp_path / "whole" / "rank0" / name)

    ranks = ad.run_local(ad.blocking.hosted(train), ranks=2)
    for whole, own, shared in ranks:
        assert own == whole[SAVED_AFTER * BATCH :]
        assert sorted(shared[-ROWS:]) == list(range(ROWS))
    (_, _, first), (_, _, second) = ranks
    assert first[:-ROWS] != second[:-ROWS]
    assert first[-ROWS:] != second[-ROWS:]


@pytest.mark.filterwarnings("ignore")
def test_a_policy_begins_with_what_a_strategy_loads_late(tmp_path: Path) -> None:
    """Regression: under ModelParallelStrategy a resumed policy began with the initial weights, and without its state.

    Such a strategy loads the checkpoint after on_fit_start.
    """
    pl = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.strategies import SingleDeviceStrategy

    from asyncdist.integrations.lightning import Averaging

    class LateStrategy(SingleDeviceStrategy):
        restore_checkpoint_after_setup = True

    def fit(epochs: int, rank: int, strategy: Any, checkpoint: Path | None) -> tuple[torch.Tensor, pl.Trainer]:
        module = linear()
        trainer = quiet_trainer([Averaging(DiLoCoPolicy, average_every=3)], max_epochs=epochs, strategy=strategy)
        rows = torch.arange(1.0, 5.0)[:, None] + rank
        trainer.fit(module, torch.utils.data.DataLoader(TensorDataset(rows)), ckpt_path=checkpoint)
        return module.net.weight.detach(), trainer

    def train(world: ad.blocking.World) -> bool:
        path = tmp_path / f"{world.rank}.ckpt"
        whole, _ = fit(4, world.rank, "auto", None)
        fit(2, world.rank, "auto", None)[1].save_checkpoint(path)
        resumed, _ = fit(4, world.rank, LateStrategy("cpu"), path)
        return torch.equal(whole, resumed)

    assert ad.run_local(ad.blocking.hosted(train), ranks=2) == [True, True]


@pytest.mark.filterwarnings("ignore")
def test_a_restarted_rank_keeps_the_leaders_optimizer_state(tmp_path: Path) -> None:
    """Regression: the rank joined the policy, and then the trainer loaded its own old checkpoint of the optimizer."""
    pl = pytest.importorskip("lightning.pytorch")

    from asyncdist.integrations.lightning import Averaging

    path, steps = tmp_path / "own.ckpt", 24

    def train(world: ad.blocking.World) -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []
        averaging = Averaging(DiLoCoPolicy, average_every=2)

        class Watch(pl.Callback):  # type: ignore[name-defined,misc]
            def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
                policy = averaging.policy
                assert policy is not None
                counts = {int(state["step"]) for state in trainer.optimizers[0].state.values()}
                seen.append((policy.iteration, counts.pop() if counts else 0))
                world.sleep(0.01)
                if policy.iteration == 4 and world.rank == 1 and not world.incarnation:
                    trainer.save_checkpoint(path)
                trainer.should_stop = policy.iteration >= steps

        trainer = quiet_trainer([averaging, Watch()], max_epochs=-1, min_steps=1)
        rows = torch.utils.data.DataLoader(TensorDataset(torch.ones(1000, 1)))
        trainer.fit(linear(torch.optim.Adam), rows, ckpt_path=path if world.incarnation else None)
        return seen

    faults = [Kill(1, at_s=0.1), Restart(1, at_s=0.15)]
    report = simulate(ad.blocking.hosted(train), ranks=3, seed=1, faults=faults, network=Network())
    seen: Any = report.results[1]
    assert seen[0][0] > 8, "it joined the running policy"
    assert all(iteration == count for iteration, count in seen), seen[:3]


@pytest.mark.filterwarnings("ignore")
def test_a_state_that_is_loaded_before_a_fit_is_used(tmp_path: Path) -> None:
    """Regression: ``load_population`` with the callback as the policy was undone by the fit, without a word.

    A state that Lightning loads for a test is not used.
    """
    pl = pytest.importorskip("lightning.pytorch")

    from asyncdist.integrations.lightning import Averaging

    def train(world: ad.blocking.World) -> list[int]:
        averaging = Averaging(DiLoCoPolicy, average_every=2)
        begun: list[int] = []

        class Watch(pl.Callback):  # type: ignore[name-defined,misc]
            def on_train_start(self, *_: Any) -> None:
                assert averaging.policy is not None
                begun.append(averaging.policy.iteration)

            def on_train_end(self, _: Any, module: Any) -> None:
                ad.blocking.save_population(tmp_path / "population", module, policy=averaging)

        rows = torch.utils.data.DataLoader(TensorDataset(torch.ones(4, 1)))
        for number in range(3):
            module = linear()
            if number == 1:
                ad.blocking.load_population(tmp_path / "population", module, policy=averaging)
            trainer = quiet_trainer([averaging, Watch()], max_epochs=1)
            trainer.fit(module, rows)
            path = tmp_path / f"{world.rank}.ckpt"
            trainer.save_checkpoint(path)
            trainer.test(module, rows, ckpt_path=path, verbose=False)
        return begun

    assert ad.run_local(ad.blocking.hosted(train), ranks=2) == [[0, 4, 0], [0, 4, 0]]


@pytest.mark.filterwarnings("ignore")
def test_a_fast_dev_run_trains_on_each_rank(tmp_path: Path) -> None:
    """Regression: AttributeError, because the logger of fast_dev_run has every attribute."""
    pl = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.demos.boring_classes import BoringModel

    from asyncdist.integrations.lightning import SelectiveAveraging

    def train(world: ad.blocking.World) -> int:
        averaging = SelectiveAveraging(average_every=1)
        trainer = pl.Trainer(
            fast_dev_run=2, devices=1, accelerator="cpu", callbacks=[averaging], default_root_dir=tmp_path
        )
        trainer.fit(BoringModel())
        return int(trainer.global_step)

    assert ad.run_local(ad.blocking.hosted(train), ranks=2) == [2, 2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_gathered_weights_are_those_of_the_policy_state(tmp_path: Path) -> None:
    """Regression: strategies that gather copies of the weights saved them before eager anchors were averaged."""
    pl = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.strategies import SingleDeviceStrategy

    from asyncdist.integrations.lightning import Averaging

    class Gathering(SingleDeviceStrategy):
        def lightning_module_state_dict(self) -> dict[str, Any]:
            return {name: tensor.clone() for name, tensor in super().lightning_module_state_dict().items()}

    class Saving(pl.Callback):  # type: ignore[name-defined,misc]
        is_equal = False

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            saved = trainer._checkpoint_connector.dump_checkpoint()["state_dict"]
            self.is_equal = all(torch.equal(saved[name], live) for name, live in module.state_dict().items())

    def train(world: ad.blocking.World) -> bool:
        torch.manual_seed(0)
        model, saving = BoringModel(), Saving()
        torch.manual_seed(1 + world.rank)
        trainer = pl.Trainer(
            max_steps=2,
            strategy=Gathering("cpu"),
            callbacks=[Averaging(DiLoCoPolicy, average_every=1, eager=True), saving],
            default_root_dir=tmp_path,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model)
        return saving.is_equal

    assert ad.run_local(ad.blocking.hosted(train), ranks=2) == [True, True]


def test_policies_of_one_class_have_keys_of_their_own() -> None:
    """Regression: a trainer with two such callbacks raised RuntimeError, even if the policies had different names."""
    pytest.importorskip("lightning.pytorch")
    from asyncdist.integrations.lightning import Averaging

    def keys(world: ad.blocking.World) -> list[str]:
        options: list[dict[str, Any]] = [{}, {"name": "x"}, {"name": "y"}]
        return [Averaging(GossipPolicy, average_every=1, **each).state_key for each in options]

    expected = [f"Averaging(GossipPolicy{name})" for name in ("", ", name='x'", ", name='y'")]
    assert ad.run_local(ad.blocking.hosted(keys), ranks=1) == [expected]


def fitted_alone(module: Any, callback: Any, data: Any) -> None:
    """Train one epoch on one rank with a callback that ``callback`` makes."""

    def fit(_: ad.blocking.World) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning warns of few workers and of short epochs
            quiet_trainer(callback(), max_epochs=1).fit(module, data)

    ad.run_local(ad.blocking.hosted(fit), ranks=1)


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_a_metric_that_is_logged_now_and_then_is_reported_once(value: float) -> None:
    """Regression: Lightning returns a new tensor at each read, so an old value was reported in each due step."""
    pl = pytest.importorskip("lightning.pytorch")
    from asyncdist.integrations.lightning import SelectiveAveraging

    module, reported = linear(), []
    train = module.training_step

    def train_and_log(batch: Any, batch_idx: int) -> Any:
        if batch_idx in (2, 5, 6):
            module.log("score", value)  # the same value three times
        return train(batch, batch_idx)

    class Look(pl.Callback):  # type: ignore[misc, name-defined]
        def __init__(self, averaging: Any) -> None:
            self.averaging = averaging

        def on_train_batch_end(self, *_: Any) -> None:
            if self.averaging._metric() is not NOT_MEASURED:
                reported.append(_[-1])

    def callbacks() -> list[Any]:
        averaging = SelectiveAveraging(average_every=1000, monitor="score", mode="max")
        return [averaging, Look(averaging)]

    module.training_step = train_and_log
    fitted_alone(module, callbacks, DataLoader(TensorDataset(torch.ones(10, 1)), shuffle=True))
    assert reported == [2, 5, 6]


def test_steps_without_a_loss_report_no_metric() -> None:
    """Regression: if ``training_step`` returned None in all steps since the last report, infinity was reported."""
    pytest.importorskip("lightning.pytorch")
    from asyncdist.integrations.lightning import SelectiveAveraging

    module, counts = linear(), []
    train = module.training_step
    module.training_step = lambda batch, batch_idx: train(batch, batch_idx) if batch_idx % 4 == 3 else None

    class Counting(SelectiveAveraging):
        def on_fit_end(self, *args: Any) -> None:
            counts.append(self._training.open_policy().awaited.state_dict()["metric"])
            super().on_fit_end(*args)

    fitted_alone(module, lambda: [Counting(average_every=1)], DataLoader(TensorDataset(torch.ones(6, 1)), shuffle=True))
    assert counts == [pytest.approx(linear().net(torch.ones(1, 1)).square().item())]


def test_a_batch_without_tensors_counts_as_one_token() -> None:
    """Regression: the error of Lightning, whose advice did not help, ended the training."""
    pytest.importorskip("lightning.pytorch")
    from asyncdist.integrations.lightning import Averaging

    module, steps = linear(), []
    module.training_step = lambda batch, batch_idx: module.net(torch.ones(1, 1)).square().mean()

    class Counting(Averaging[Any]):
        def on_train_batch_end(self, *args: Any) -> None:
            step = self._training.step
            self._training.step = lambda metric, tokens: steps.append(tokens) or step(metric, tokens)  # type: ignore
            super().on_train_batch_end(*args)
            self._training.step = step  # type: ignore[method-assign]

    data: Any = DataLoader(["a", "b", "c"], batch_size=2, collate_fn=list, shuffle=True)  # type: ignore[arg-type]
    fitted_alone(module, lambda: [Counting(DiLoCoPolicy, average_every=2, weights="tokens")], data)
    assert steps == [1, 1]


@pytest.mark.parametrize("index", [3, -2])
def test_an_index_without_an_optimizer_is_refused(index: int) -> None:
    """Regression: a bare IndexError."""
    pytest.importorskip("lightning.pytorch")
    from asyncdist.integrations.lightning import SelectiveAveraging

    def choose(world: ad.blocking.World) -> str:
        with pytest.raises(TypeError, match=r"^optimizer_index must be an integer, got 'a'"):
            SelectiveAveraging(average_every=1, optimizer_index="a")  # type: ignore[arg-type]
        averaging = SelectiveAveraging(average_every=1, optimizer_index=index)
        with pytest.raises(ValueError, match=r"^optimizer_index must be") as caught:
            averaging._choose([torch.optim.SGD(torch.nn.Linear(1, 1).parameters())])
        return str(caught.value)

    [text] = ad.run_local(ad.blocking.hosted(choose), ranks=1)
    assert text.endswith(f"got {index}")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_batch_size_finder_warns_of_no_validation_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the finder sets up the validation loader as if for training, and its rows are read in order."""
    pl = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.callbacks import BatchSizeFinder
    from lightning.pytorch.demos.boring_classes import BoringModel

    from asyncdist.integrations import joining
    from asyncdist.integrations.lightning import SelectiveAveraging

    class Module(BoringModel):
        batch_size = 2

        def __init__(self, shuffle: bool) -> None:
            super().__init__()
            self.shuffle = shuffle

        def train_dataloader(self) -> Any:
            rows: Any = torch.randn(8, 32)
            return torch.utils.data.DataLoader(rows, self.batch_size, shuffle=self.shuffle)

    def train(world: ad.blocking.World, shuffle: bool) -> None:
        trainer = pl.Trainer(
            max_steps=1,
            devices=1,
            accelerator="cpu",
            callbacks=[SelectiveAveraging(average_every=1), BatchSizeFinder(init_val=2, max_trials=1)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(Module(shuffle))

    def warnings_of(shuffle: bool) -> int:
        monkeypatch.setattr(joining, "_logged", set())
        caplog.clear()
        ad.run_local(ad.blocking.hosted(train), shuffle, ranks=2)
        return sum("in the order of the data set" in record.message for record in caplog.records)

    assert warnings_of(shuffle=True) == 0
    assert warnings_of(shuffle=False) == 1, "the training rows are read in order"


def test_a_finished_replica_waits_for_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: if a rank worked longer than 60 s at the end of its fit, the other ranks of its replica failed.

    The state of all ranks is gathered when it is saved, which also takes as long as the slowest rank.
    """
    from asyncdist.integrations import lightning
    from asyncdist.integrations.replicas import Replica, state_of_rank

    def main(world: ad.blocking.World) -> tuple[float, list[Any]]:
        replica = Replica(0, world.rank, 2)
        monkeypatch.setattr(lightning, "show_replica", lambda *_: replica)
        averaging = lightning.SelectiveAveraging(average_every=2, replica_size=2)
        monkeypatch.setattr(averaging, "_warn_of_no_metric", lambda _: None)
        own = {"own": world.rank}
        monkeypatch.setattr(averaging._training, "state_dict", lambda: {**own})
        if world.rank == 0:
            world.sleep(100.0)
        averaging.on_fit_end(None, None)  # type: ignore[arg-type]
        ended_at = world.time()
        own.clear()
        if world.rank == 1:
            world.sleep(300.0)
        saved = averaging.state_dict()
        return ended_at, [state_of_rank(Replica(0, place, 2), saved) for place in range(2)] if saved else []

    results = ad.simulate(ad.blocking.hosted(main), ranks=2, seed=1).results
    assert results[1][0] < 1.0
    assert (results[0][1], results[1][1]) == ([{"own": 0}, {"own": 1}], [])

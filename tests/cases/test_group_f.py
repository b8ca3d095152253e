"""The rung gradient_checkpointing, end to end: rows 76, 79, 80, 82, 84 and 87. The blocks: tests/test_recompute.py."""

import math
import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional

from adaptive_trainer import AdaptiveTrainer, LadderExhausted, Plan
from adaptive_trainer.testing import inject_oom
from tests.cases.hooks import at_forward, rungs
from tests.zoo import ZOO, loss, same, state_of

VOCABULARY = 11
CHECKPOINTED = Plan(gradient_checkpointing=True)


class Stack(nn.Module):
    """An embedding, blocks, a head."""

    def __init__(self, *blocks, embedding=None):
        super().__init__()
        self.embed = embedding or nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens):
        x = self.embed(tokens).mean(1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class FunctionalDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return functional.dropout(self.linear(x), 0.4, training=self.training)


class LowRank(nn.Module):
    """A frozen layer with a trainable correction."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def normed(momentum=0.1):
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=momentum), nn.ReLU())


def dropped():
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), nn.Tanh())


def frozen(module):
    return module.requires_grad_(False)


def frozen_first():
    return Stack(frozen(dropped()), dropped(), dropped(), embedding=frozen(nn.Embedding(VOCABULARY, 8)))


def tied():
    model = Stack(dropped(), dropped(), dropped())
    model.blocks[2][0].weight = model.blocks[0][0].weight
    return model


def trained(make, *, plan=None, prepare=None, steps=4, **rest):
    """A model after some steps, with the trainer and the result."""
    torch.manual_seed(1)
    model = make()
    if prepare is not None:
        prepare(model)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (steps * 8, 5), generator=generator)
    data = torch.utils.data.TensorDataset(tokens, torch.randint(4, (len(tokens),), generator=generator))
    trainer = AdaptiveTrainer(model, data, loss=loss, batch_size=8, plan=plan, progress=False, **rest)
    return model, trainer, trainer.fit()


def assert_same_as_without(make, **rest):
    """Bit for bit, with it from the start and switched on in mid-run."""
    _, plain, _ = trained(make)
    _, from_the_start, _ = trained(make, plan=CHECKPOINTED)
    model, switched_on, result = trained(
        make, ladder=["gradient_checkpointing"], prepare=lambda model: at_forward(model, 3), **rest
    )
    assert result.plan == CHECKPOINTED
    assert same(state_of(from_the_start), state_of(plain)) is None
    assert same(state_of(switched_on), state_of(plain)) is None
    return model, switched_on


@pytest.mark.parametrize("momentum", [0.1, None])
def test_case_076_batch_norm_statistics_move_once_a_step(momentum):
    model, _ = assert_same_as_without(lambda: Stack(normed(momentum), normed(momentum)))
    assert [block[1].num_batches_tracked.item() for block in model.blocks] == [4, 4]


@pytest.mark.parametrize(
    "make", [frozen_first, lambda: Stack(LowRank(), LowRank(), embedding=frozen(nn.Embedding(VOCABULARY, 8)))]
)
def test_case_079_behind_frozen_parts_every_trainable_parameter_is_trained(make):
    torch.manual_seed(1)
    before = make().state_dict()
    model, trainer = assert_same_as_without(make)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == trainable
    assert len(trainer._loop.workshop.state.optimizer.state) == len(trainable)


def test_case_080_wholly_frozen_blocks_are_harmless():
    """All blocks and what comes before them are frozen: only the head is trained."""
    model, _ = assert_same_as_without(
        lambda: Stack(frozen(dropped()), frozen(dropped()), embedding=frozen(nn.Embedding(VOCABULARY, 8)))
    )
    assert model.head.weight.requires_grad


@pytest.mark.parametrize("block", [dropped, FunctionalDropout], ids=["layer", "function"])
def test_case_082_dropout_masks_are_the_forwards_own(block):
    assert_same_as_without(lambda: Stack(block(), block()))


@pytest.mark.parametrize("make", [tied, lambda: Stack(*[dropped()] * 3)], ids=["weight", "whole_block"])
def test_case_084_a_shared_weights_gradient_arrives_once_a_step(make):
    def counted(plan):
        fired = Counter()

        def watch(model):
            for name, parameter in model.named_parameters():
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.update([name]))

        trained(make, plan=plan, prepare=watch)
        return fired

    assert counted(CHECKPOINTED) == counted(None)
    assert set(counted(CHECKPOINTED).values()) == {4}
    assert_same_as_without(make)


@pytest.mark.parametrize("kind", ["mlp", "cnn_batch_norm", "dropout_transformer", "lstm", "partly_frozen"])
def test_case_087_no_rung_warns(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = AdaptiveTrainer(
            ZOO[kind].make(), ZOO[kind].data(16), loss=loss, batch_size=8, eval_data=ZOO[kind].data(8),
            ladder=["gradient_checkpointing", "halve_batch", "amp"], progress=False,
        )  # fmt: skip
        with inject_oom(step=1, times=math.inf), pytest.raises(LadderExhausted):
            trainer.fit()
        result = trainer.fit()
    assert result.plan.gradient_checkpointing
    assert result.plan.precision == "bf16"


def test_case_087_a_hugging_face_models_own_switch_does_not_warn():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(16, (4, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = AdaptiveTrainer(
            model, [{"input_ids": tokens, "labels": tokens}] * 3, ladder=["gradient_checkpointing"], progress=False
        )
        with inject_oom(step=2):
            result = trainer.fit()
    assert rungs(result) == ["gradient_checkpointing"]
    assert not model.is_activation_checkpointing

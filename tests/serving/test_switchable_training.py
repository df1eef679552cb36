"""The policy's gradient, its direction under a constraint, and the three phases of training."""

import itertools
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import GPT2Config, GPT2LMHeadModel

from assay.serving import Decisions, SwitchableConfig, SwitchableTrainer, barrier_direction, make_switchable
from assay.serving.switchable import Policy, log_probability, token_loss

pytestmark = pytest.mark.filterwarnings("ignore")


def gpt2(layers=2, width=16, seed=0):
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=12, n_embd=width, n_layer=layers, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def switched(layers=2, candidates=("attention", "ffn"), **options):
    torch.manual_seed(1)
    return make_switchable(gpt2(layers), SwitchableConfig(candidates, **options)).eval()


def copies(count, generator):
    """Four digits, a separator, and the digits again."""
    digits = torch.randint(10, (count, 4), generator=generator)
    ids = torch.cat([digits, torch.full((count, 1), 10), digits], 1)
    labels = ids.clone()
    labels[:, :5] = -100
    return {"input_ids": ids, "labels": labels}


# -- the gradient ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("baseline", [0.0, 0.7])
def test_sampled_gradients_have_the_exact_mean(baseline):
    """Two decisions, four outcomes; a baseline that does not depend on the sample changes no mean."""
    torch.manual_seed(0)
    policy = Policy(6, 2, 5)
    with torch.no_grad():
        policy.last.weight.normal_()
        policy.last.bias.normal_()
    states = torch.randn(1, 3, 6)
    loss = {u: 1.0 + 2.0 * u[0] - 0.7 * u[1] + 1.3 * u[0] * u[1] for u in itertools.product((0, 1), repeat=2)}
    parameters = list(policy.parameters())[:6]
    logits = policy(states)[0]
    exact = sum(
        value * log_probability(logits, torch.tensor([u], dtype=torch.bool)).exp().sum() for u, value in loss.items()
    )
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(exact, parameters, retain_graph=True)])
    single = {}
    for u in loss:
        log = log_probability(logits, torch.tensor([u], dtype=torch.bool)).sum()
        single[u] = torch.cat([g.flatten() for g in torch.autograd.grad(log, parameters, retain_graph=True)])
    draws = torch.rand(20_000, 2, generator=torch.Generator().manual_seed(1)) < logits.detach().sigmoid()
    values = torch.stack([(loss[tuple(u)] - baseline) * single[tuple(u)] for u in draws.long().tolist()])
    error = values.std(0) / len(values) ** 0.5
    assert ((values.mean(0) - wanted).abs() <= 3 * error + 1e-7).float().mean() >= 0.99
    assert ((values.mean(0) - wanted).abs() <= 4.5 * error + 1e-7).all()


def test_log_probability_counts_free_decisions_only():
    logits = torch.tensor([[0.3, -1.0, 2.0]])
    taken = torch.tensor([[True, False, True]])
    p = logits.sigmoid()[0]
    assert_close(log_probability(logits, taken), (p[0].log() + (1 - p[1]).log() + p[2].log())[None])
    free = torch.tensor([[1.0, 0.0, 1.0]])
    assert_close(log_probability(logits, taken, free), (p[0].log() + p[2].log())[None])


vectors = st.lists(st.floats(-3, 3, width=32), min_size=3, max_size=3).map(torch.tensor)


@given(g_c=vectors, g_q=vectors, slack=st.floats(-2, 2), alpha=st.floats(0.1, 3), beta=st.floats(0.1, 3))
def test_the_barrier(g_c, g_q, slack, alpha, beta):
    g_c, g_q = g_c.double(), g_q.double()
    v, multiplier = barrier_direction(g_c, g_q, slack, alpha, beta, 50.0)
    square = float(g_q @ g_q)
    phi = min(alpha * slack, beta * square) if slack > 0 else alpha * slack
    assert 0 <= multiplier <= 50
    assert_close(v, g_c + multiplier * g_q)
    if multiplier < 50 and square > 1e-6:
        assert float(v @ g_q) >= phi - 1e-6
    if float(g_c @ g_q) >= phi:
        assert multiplier == 0
    if square == 0:
        assert torch.equal(v, g_c)


def test_a_violated_constraint_turns_the_direction_round():
    g_q = torch.tensor([1.0, 2.0, -1.0])
    v, _ = barrier_direction(-g_q, g_q, 0.5)
    assert float(v @ g_q) > 0
    with pytest.raises(ValueError, match="one shape"):
        barrier_direction(g_q, g_q[:2], 0.0)


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("harmful", [False, True])
def test_one_decision_converges(harmful):
    """Skipping saves all the cost; where it does no harm it is learned, where it costs a loss of 1 it is not."""
    model = switched(2, ("ffn",))

    def quality(model, batch, decisions):
        return (~decisions.ffn[:, 1]).float() if harmful else torch.zeros(len(decisions))

    trainer = SwitchableTrainer(model, copies, quality=quality)
    model.cost = lambda decisions, inputs, outputs=0: decisions.ffn[:, 1].double()
    trainer.train_policy(250, batch_size=32, lr=2e-2)
    chosen = model.decide(copies(32, torch.Generator())["input_ids"])
    assert bool(chosen.ffn[:, 1].all()) == harmful
    assert bool(chosen.ffn[:, 1].any()) == harmful


def test_phases_in_turn():
    model = switched(3)
    told = []
    trainer = SwitchableTrainer(model, copies, seed=1, progress=lambda *x: told.append(x))
    losses = trainer.robustify(60, batch_size=32, lr=1e-2, warmup=5)
    assert losses[-1] < losses[0] and not model.training
    weights = [p.clone() for p in model.model.parameters()]
    log = trainer.train_policy(8, batch_size=32)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.model.parameters())), "the model is frozen"
    assert len(log.loss) == len(log.cost) == len(log.ema) == len(log.masks) == 8
    assert all(0 <= x <= 50 for x in log.multiplier) and all(0 < c < 1.1 for c in log.cost)
    assert log.ema[0] == pytest.approx(0.9 * log.limit + 0.1 * log.loss[0]), "it starts at the full model's loss"
    assert log.ema[1] == pytest.approx(0.9 * log.ema[0] + 0.1 * log.loss[1])
    joint = trainer.train_joint(4, batch_size=32)
    assert len(joint.loss) == 4
    assert any(not torch.equal(a, b) for a, b in zip(weights, model.model.parameters()))
    assert told[0] == (1, 60, "robustify") and told[-1] == (4, 4, "joint")


def test_training_is_decided_by_the_seed():
    logs = []
    for seed in (3, 3, 4):
        model = switched(3)
        logs.append(SwitchableTrainer(model, copies, seed=seed).train_policy(5, batch_size=16).loss)
    assert logs[0] == logs[1] != logs[2]


def test_the_known_first_layer_changes_no_loss():
    model = switched(3, ("attention", "ffn", "token"))
    batch = copies(8, torch.Generator().manual_seed(0))
    keep = torch.ones(8, 9, dtype=torch.bool)
    keep[:, 2] = False
    chosen = Decisions(torch.rand(8, 3) < 0.5, torch.rand(8, 3) < 0.5, keep)
    states = model.first_layer(batch["input_ids"])
    assert_close(token_loss(model, batch, chosen), token_loss(model, batch, chosen, states))


def test_token_loss_is_the_models_loss():
    model = switched(2)
    batch = copies(8, torch.Generator().manual_seed(0))
    everything = Decisions.full(8, 2)
    assert_close(token_loss(model, batch, everything).mean(), model.model(**batch).loss)


@pytest.mark.parametrize("objective", ["weighted", "quality"])
def test_other_objectives(objective):
    model = switched(3)
    log = SwitchableTrainer(model, copies, seed=0).train_policy(
        3, batch_size=16, objective=objective, weight=5.0, baseline=False
    )
    assert log.multiplier == [1.0] * 3


def test_rows_are_drawn_from_a_list():
    rows = [{k: v[i] for k, v in copies(10, torch.Generator()).items()} for i in range(10)]
    log = SwitchableTrainer(switched(2), rows).train_policy(2, batch_size=4)
    assert len(log.loss) == 2


def test_bad_input():
    model = switched(2)
    with pytest.raises(TypeError, match="must be a SwitchableModel, not GPT2LMHeadModel"):
        SwitchableTrainer(gpt2(), copies)
    with pytest.raises(ValueError, match="data is empty"):
        SwitchableTrainer(model, [])
    with pytest.raises(ValueError, match="quality must be 'loss' or a function"):
        SwitchableTrainer(model, copies, quality="rouge")
    for train in ("train_policy", "train_joint"):
        with pytest.raises(ValueError, match="objective must be"):
            getattr(SwitchableTrainer(model, copies), train)(1, objective="best")


def test_skipping_half_the_blocks_saves_time():
    """Real time, not masked computation: half the blocks of a wide model in clearly less than the full model's time."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=256, n_layer=6, n_head=4, n_positions=128)
    model = make_switchable(GPT2LMHeadModel(config).eval(), SwitchableConfig(("attention", "ffn"))).eval()
    ids = torch.randint(64, (4, 96))
    half = Decisions.static([True, False] * 3, [True, False] * 3, 4)
    times = {"full": [], "half": []}
    with torch.inference_mode():
        for _ in range(15):
            for name, chosen in (("full", Decisions.full(4, 6)), ("half", half)):
                start = time.perf_counter()
                model(ids, decisions=chosen, mode="bucket")
                times[name].append(time.perf_counter() - start)
    assert min(times["half"]) < 0.8 * min(times["full"])


def test_the_policy_never_sees_what_it_predicts():
    """Decisions in training are those of the prompt alone, as when generating."""
    model = switched(3, ("attention", "ffn", "token"))
    with torch.no_grad():
        model.policy.last.weight.normal_(std=3.0)
        model.policy.last.bias.zero_()
    batch = copies(16, torch.Generator().manual_seed(2))
    trained = model.decide(batch["input_ids"], labels=batch["labels"])
    prompt = model.decide(batch["input_ids"][:, :5])
    assert torch.equal(trained.attn, prompt.attn) and torch.equal(trained.ffn, prompt.ffn)
    assert torch.equal(trained.tokens[:, :5], prompt.tokens) and trained.tokens[:, 5:].all()
    other = batch["input_ids"].clone()
    other[:, 5:] = 0
    assert torch.equal(model.decide(other, labels=batch["labels"]).attn, trained.attn)
    model(batch["input_ids"], labels=batch["labels"])
    assert torch.equal(model.last_decisions.attn, trained.attn)


def test_eps_moves_the_limit():
    limits = [
        SwitchableTrainer(switched(2, eps=eps), copies, seed=0).train_policy(0, batch_size=16).limit
        for eps in (0.0, 0.25)
    ]
    assert limits[1] - limits[0] == pytest.approx(0.25, abs=1e-6)


def test_steps_of_the_policy_have_a_bounded_direction():
    model = switched(2)
    seen = []
    trainer = SwitchableTrainer(model, copies, quality=lambda m, b, d: 1e4 * (~d.ffn[:, 1]).float(), seed=0)
    real = torch.optim.Adam.step

    def step(self, *args, **kwargs):
        seen.append(torch.cat([p.grad.flatten() for g in self.param_groups for p in g["params"]]).norm().item())
        return real(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.Adam, "step", step)
        trainer.train_policy(5, batch_size=16, objective="quality")
    assert max(seen) <= 1 + 1e-5 and max(seen) > 0.99


def test_what_is_not_finite_is_refused():
    nan = float("nan")
    for g_c, g_q, slack in ((1.0, 1.0, nan), (nan, 1.0, 0.0), (1.0, float("inf"), 0.0)):
        with pytest.raises(ValueError, match="must be finite"):
            barrier_direction(torch.tensor([g_c]), torch.tensor([g_q]), slack)
    trainer = SwitchableTrainer(switched(2), copies, quality=lambda m, b, d: torch.full((len(d),), nan))
    with pytest.raises((FloatingPointError, ValueError)):
        trainer.train_policy(1, batch_size=4)
    trainer = SwitchableTrainer(switched(2), copies)
    for options, message in (
        ({"steps": -1}, "steps must be at least 0, not -1"),
        ({"steps": 1, "batch_size": 0}, "batch_size must be at least 1"),
        ({"steps": 1, "drop": 1.5}, r"drop must lie in \[0, 1\]"),
        ({"steps": 1, "undropped": -1}, "undropped must lie"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer.robustify(**options)

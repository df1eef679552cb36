"""Generation with a tandem is lossless; its cache holds what it should; routers, training, drafting alone."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from assay.serving import Router, TandemCandidateGenerator, TandemConfig, TandemModel, TandemTrainer, fit_router
from assay.serving.tandem import Drafter, drafting, expected_accepted, speedup, training_arguments
from assay.serving.tandem.adapters import keys_values

pytestmark = pytest.mark.filterwarnings("ignore")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def llama(layers, hidden, seed, vocabulary=23, spread=0.3):
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=spread,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def pair():
    """An untrained pair: few drafts are accepted, so that every kind of rejection is met."""
    torch.manual_seed(0)
    return TandemModel(llama(4, 48, 1), llama(2, 32, 2)).eval()


@pytest.fixture(scope="module")
def alike():
    """A pair whose secondary is nearly the primary: most drafts are accepted, but not all."""
    primary, secondary = llama(3, 32, 1), llama(3, 32, 1)
    model = TandemModel(primary, secondary, TandemConfig(layer_map=[0, 1, 2])).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for linear in model.projections.maps:
            linear.weight.copy_(torch.eye(32))
        for p in secondary.parameters():
            p.add_(0.02 * torch.randn_like(p))
    return model


def prompt(batch=1, length=9, seed=0, vocabulary=23):
    return torch.randint(1, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


CASES = {
    "plain": {"max_new_tokens": 20},
    "odd": {"max_new_tokens": 13},
    "one": {"max_new_tokens": 1},
    "two": {"max_new_tokens": 2},
    "repetition": {"max_new_tokens": 24, "repetition_penalty": 1.6},
    "no repeats": {"max_new_tokens": 24, "no_repeat_ngram_size": 2},
    "at least": {"max_new_tokens": 12, "min_new_tokens": 12, "eos_token_id": 7},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("draft_length", [1, 2, 4, 7])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("which", ["pair", "alike"])
def test_greedy_output_is_the_primarys_token_for_token(request, which, case, draft_length, device):
    model = copy.deepcopy(request.getfixturevalue(which)).to(device)  # the fixture stays where it is
    for seed in range(3):
        ids = prompt(seed=seed).to(device)
        expected = model.primary.generate(ids, do_sample=False, **CASES[case])
        out = model.generate(ids, draft_length=draft_length, do_sample=False, **CASES[case])
        assert torch.equal(out, expected)


@pytest.mark.parametrize("which", ["pair", "alike"])
def test_the_end_of_a_text_within_a_block(request, which):
    """Every token that the primary says, in turn, is made the end."""
    model, ids = request.getfixturevalue(which), prompt()
    said = model.primary.generate(ids, do_sample=False, max_new_tokens=12)[0, 9:]
    for stop in said.unique().tolist():
        expected = model.primary.generate(ids, do_sample=False, max_new_tokens=12, eos_token_id=stop)
        out = model.generate(ids, draft_length=5, do_sample=False, max_new_tokens=12, eos_token_id=stop)
        assert torch.equal(out, expected)
        assert out[0, -1] == stop


def test_a_padded_prompt(pair):
    ids = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompt()], 1)
    mask = (torch.arange(13) >= 4).long()[None]
    expected = pair.primary.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=15)
    out = pair.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=15)
    assert torch.equal(out, expected)


def test_a_twin_accepts_everything(alike):
    primary = alike.primary
    twin = TandemModel(primary, copy.deepcopy(primary), alike.tandem_config).eval()
    with torch.no_grad():
        for linear in twin.projections.maps:
            linear.weight.copy_(torch.eye(32))
    with drafting(twin, 4) as made:
        primary.generate(prompt(), assistant_model=twin.secondary, do_sample=False, max_new_tokens=21)
    assert made[0].rounds == [(4, 4)] * 4, "one token from the prompt, then five in each round"
    assert "_get_candidate_generator" not in vars(primary)
    # Drafts are scored by the processors that the primary's scores go through: nothing is rejected with them, either.
    with drafting(twin, 4) as made:
        primary.generate(
            prompt(), assistant_model=twin.secondary, do_sample=False, max_new_tokens=21, repetition_penalty=1.6
        )
    assert made[0].rounds == [(4, 4)] * 4


@pytest.mark.parametrize("new", [2, 3, 6, 8])
def test_nothing_is_drafted_that_cannot_be_said(alike, new):
    """The primary adds a token of its own to every draft, so a draft leaves room for it."""
    with drafting(alike, 7) as made:
        alike.primary.generate(prompt(), assistant_model=alike.secondary, do_sample=False, max_new_tokens=new)
    said = 1
    for drafted, accepted in made[0].rounds:
        assert drafted == min(7, new - said - 1)
        said += accepted + 1
    assert said >= new - 1


class Adapted(torch.nn.Module):
    """A model around a model, which passes generate() on to the inner one, as adapters do."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)

    def generate(self, *args, **kwargs):
        return self.inner.generate(*args, **kwargs)


def test_a_primary_within_adapters_is_found_and_another_wrapper_is_refused(alike):
    class Known(Adapted):
        def get_base_model(self):
            return self.inner

    model = TandemModel(Known(alike.primary), alike.secondary, TandemConfig(layer_map=[0, 1, 2])).eval()
    with drafting(model, 4) as made:
        model.primary.generate(prompt(), assistant_model=model.secondary, do_sample=False, max_new_tokens=9)
    assert len(made) == 1 and "_get_candidate_generator" not in vars(alike.primary)
    assert torch.equal(
        model.generate(prompt(), do_sample=False, max_new_tokens=9),
        alike.primary.generate(prompt(), do_sample=False, max_new_tokens=9),
    )
    assert model.generate(prompt(), speculative=False, max_new_tokens=5).shape == (1, 14)
    model = TandemModel(Adapted(alike.primary), alike.secondary).eval()
    with pytest.raises(RuntimeError, match=r"Adapted.generate\(\) did not ask for the tandem's drafts"):
        model.generate(prompt(), do_sample=False, max_new_tokens=9)


@pytest.mark.parametrize(("threshold", "longest"), [(0.0, 6), (1.0, 1)])
def test_thresholds_at_the_ends_of_a_router(alike, threshold, longest):
    with drafting(alike, 6, Router(threshold)) as made:
        alike.primary.generate(prompt(), assistant_model=alike.secondary, do_sample=False, max_new_tokens=25)
    lengths = [n for n, _ in made[0].rounds]
    assert set(lengths[:2]) == {longest} and max(lengths) == longest


@pytest.mark.slow
def test_twenty_thousand_sampled_pairs_have_the_primarys_distribution():
    """Two tokens of five symbols, through the decoding loop of transformers, and the rate at which drafts are accepted.

    The first token comes from the primary's reading of the prompt; the second is drafted, then accepted or drawn from
    the residual.
    """
    primary, secondary = llama(1, 16, 3, 5, 0.9), llama(1, 16, 4, 5, 0.9)
    torch.manual_seed(1)
    model = TandemModel(primary, secondary).eval()
    ids = torch.tensor([[1, 4, 2]])
    with torch.no_grad():
        first = primary(ids).logits[0, -1].softmax(-1)
        given = torch.cat([torch.cat([ids, torch.tensor([[a]])], 1) for a in range(5)])
        second = primary(given).logits[:, -1].softmax(-1)
        drafter, drafts = Drafter(model), []
        hidden = primary(ids, output_hidden_states=True).hidden_states
        for a in range(5):
            drafter.absorb(hidden, 3 - drafter.read)
            drafts.append(drafter.step(torch.tensor([[a]]))[0].softmax(-1))
    joint = (first[:, None] * second).flatten().double().numpy()
    accepted = float((first * torch.minimum(second, torch.stack(drafts)).sum(-1)).sum())
    count, wanted, kept = np.zeros(25), 20_000, []
    torch.manual_seed(7)
    real = TandemCandidateGenerator.update_candidate_strategy

    def note(self, input_ids, scores, num_matches):
        real(self, input_ids, scores, num_matches)
        if self._drafted:
            kept.append(int(num_matches))

    # One call of generate() takes milliseconds; its decoding loop alone, with the same arguments, a fraction of that.
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(TandemCandidateGenerator, "update_candidate_strategy", note)
        for _ in range(wanted):
            pair = sample_two(model, ids)
            count[5 * pair[0] + pair[1]] += 1
    assert count.sum() == wanted
    assert chisquare(count, joint / joint.sum() * wanted).pvalue > 0.01
    assert np.mean(kept) == pytest.approx(accepted, abs=4 * (accepted * (1 - accepted) / wanted) ** 0.5)
    assert 0.1 < accepted < 0.9, "a test of acceptance needs both outcomes"


def sample_two(model, ids):
    """The two sampled tokens of one speculative generation, by the loop of transformers on prepared arguments."""
    from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
    from transformers.generation.stopping_criteria import MaxLengthCriteria

    config = GenerationConfig(do_sample=True, max_length=ids.shape[1] + 3, pad_token_id=0)
    made = TandemCandidateGenerator(model, 1, generation_config=config, logits_processor=LogitsProcessorList())
    model.primary._get_candidate_generator = lambda **kwargs: made
    try:
        out = model.primary._assisted_decoding(
            ids,
            logits_processor=LogitsProcessorList(),
            stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(max_length=ids.shape[1] + 2)]),
            generation_config=config,
            assistant_model=model.secondary,
            cache=DynamicCache(config=model.primary.config),
            use_cache=True,
            attention_mask=torch.ones_like(ids),
        )
    finally:
        del model.primary._get_candidate_generator
    return out[0, ids.shape[1] : ids.shape[1] + 2].tolist()


def test_sampling_through_generate_agrees_with_the_primarys_marginals(pair):
    """The same through the public door, with temperature and top-k, where fewer draws tell less."""
    ids, options = prompt(length=3), {"do_sample": True, "temperature": 0.7, "top_k": 6, "max_new_tokens": 3}
    counts = np.zeros((2, 23))
    torch.manual_seed(3)
    for _ in range(400):
        counts[0, int(pair.generate(ids, **options)[0, -1])] += 1
    many = pair.primary.generate(ids.expand(2000, -1), **options)[:, -1]
    counts[1] = np.bincount(many.numpy(), minlength=23)
    expected = counts[1] / 2000
    kept = expected * 400 >= 5
    observed = np.append(counts[0][kept], counts[0][~kept].sum())
    wanted = np.append(expected[kept], expected[~kept].sum()) * 400
    assert chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-3


def test_two_calls_with_one_seed_agree(alike):
    outs = []
    for _ in range(2):
        torch.manual_seed(11)
        outs.append(alike.generate(prompt(), do_sample=True, max_new_tokens=20))
    assert torch.equal(*outs)


def test_the_cache_holds_projections_of_verified_tokens(alike):
    """After each round all verified tokens but the newest, as if they had been projected from scratch."""
    checked = []

    class Checking(TandemCandidateGenerator):
        def get_candidates(self, input_ids, *args, **kwargs):
            out = super().get_candidates(input_ids, *args, **kwargs)
            if self.drafter.read:
                n = input_ids.shape[1] - 1
                assert self.drafter.read == n
                hidden = self.model.read(input_ids[:, :n]).hidden_states
                states = self.model.projections({s: hidden[s] for s in range(len(hidden))})
                expected = keys_values(self.model.secondary, states, torch.arange(n)[None])
                for layer, (keys, values) in zip(self.drafter.cache.layers, expected):
                    assert_close(layer.keys[:, :, :n], keys, rtol=1e-4, atol=1e-4)
                    assert_close(layer.values[:, :, :n], values, rtol=1e-4, atol=1e-4)
                checked.append(n)
            return out

    made = []

    def make(generation_config, logits_processor, model_kwargs, **kwargs):
        made.append(Checking(alike, 4, generation_config=generation_config, model_kwargs=model_kwargs))
        return made[-1]

    alike.primary._get_candidate_generator = make
    try:
        alike.primary.generate(prompt(), assistant_model=alike.secondary, do_sample=False, max_new_tokens=30)
    finally:
        del alike.primary._get_candidate_generator
    accepted = [n for _, n in made[0].rounds]
    assert len(checked) > 3 and [b - a for a, b in pairwise(checked)] == [n + 1 for n in accepted[: len(checked) - 1]]
    assert 0 < sum(accepted) < sum(n for n, _ in made[0].rounds)


def test_tokens_are_streamed_and_details_returned(alike):
    class Words(BaseStreamer):
        def __init__(self):
            self.seen, self.ended = [], False

        def put(self, value):
            self.seen += value.flatten().tolist()

        def end(self):
            self.ended = True

    words = Words()
    out = alike.generate(
        prompt(), do_sample=False, max_new_tokens=15, streamer=words, return_dict_in_generate=True, output_logits=True
    )
    assert words.ended and words.seen == out.sequences[0].tolist()
    assert len(out.logits) == 15


# -- adaptive length ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adaptive", [0.0, 0.4, 1.0, "router"])
def test_stopping_early_changes_no_token(alike, adaptive):
    if adaptive == "router":
        adaptive = fit_router(alike, prompt(16, 24, 3), steps=50, label="hard")
    ids = prompt()
    expected = alike.primary.generate(ids, do_sample=False, max_new_tokens=25)
    with drafting(alike, 6, adaptive) as made:
        out = alike.primary.generate(ids, assistant_model=alike.secondary, do_sample=False, max_new_tokens=25)
    assert torch.equal(out, expected)
    lengths = [n for n, _ in made[0].rounds]
    if adaptive == 0.0:
        assert max(lengths) == 6
    if adaptive == 1.0:
        assert set(lengths) == {1}


def test_a_router_learns_where_the_models_agree(alike):
    data = prompt(64, 24, 1)
    router = fit_router(alike, data, label="hard", steps=300)
    with torch.no_grad():
        out = alike(prompt(64, 24, 2), block_size=8)
        chances = out.logits.softmax(-1)
        token = chances.argmax(-1, keepdim=True)
        right = (token == out.primary_logits.argmax(-1, keepdim=True)).squeeze(-1)
        found = router(chances, token, torch.arange(24) % 8)
    assert found[right].mean() > found[~right].mean() + 0.05
    assert torch.equal(
        fit_router(alike, data, steps=5)(chances, token, 0), fit_router(alike, data, steps=5)(chances, token, 0)
    )


def test_a_router_is_saved(tmp_path):
    router = Router(0.6, 4, 8)
    router.save(tmp_path)
    again = Router.load(tmp_path)
    chances = torch.rand(3, 9).softmax(-1)
    token = torch.tensor([[0], [8], [4]])
    assert torch.equal(router(chances, token, 2), again(chances, token, 2)) and again.threshold == 0.6
    assert Router(top_k=20).features(chances, token, 0).shape == (3, 23), "a small vocabulary is padded"


def test_arithmetic_of_speculation():
    for alpha in (0.0, 0.3, 0.9):
        for gamma in (1, 4):
            mean = sum(k * alpha**k * (1 - alpha) for k in range(gamma)) + gamma * alpha**gamma
            assert expected_accepted(alpha, gamma) == pytest.approx(mean)
    assert expected_accepted(1.0, 5) == 5
    assert speedup(3.0, 4, 0.0, 1.0) == 4 and speedup(0.0, 4, 0.25, 1.0) == 0.5
    assert speedup(3.0, 4, 0.1, 1.0, 1.6) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="acceptance must lie"):
        expected_accepted(1.1, 2)


# -- alone -------------------------------------------------------------------------------------------------------------


def by_hand(model, ids, block, new, free=False):
    """The same from its definition: parallel passes over everything, one token at a time."""
    start = ids.shape[1] - 1
    for step in range(new):
        n = ids.shape[1]
        if free and step % (block + 1) == 0:
            logits, start = model.primary(ids).logits, n
        else:
            hidden = model.read(ids).hidden_states
            drafter = Drafter(model)
            drafter.absorb(hidden, start)
            for t in range(start, n):
                logits = drafter.step(ids[:, t : t + 1])[:, None]
            if not free and (step + 1) % block == 0:
                start += block
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("block", [1, 2, 3])
def test_alone_is_its_definition(pair, block, free):
    ids = prompt(2, 7)
    with torch.no_grad():
        expected = by_hand(pair, ids, block, 8, free)
    out = pair.generate(ids, speculative=False, draft_length=block, free_token=free, max_new_tokens=8)
    assert torch.equal(out, expected)


def test_alone_with_padding_and_batches_is_row_by_row(pair):
    ids = prompt(3, 8)
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 2, 5)):
        ids[row, :pad], mask[row, :pad] = 0, 0
    out = pair.generate(ids, speculative=False, attention_mask=mask, max_new_tokens=9)
    for row, pad in enumerate((0, 2, 5)):
        single = pair.generate(ids[row : row + 1, pad:], speculative=False, max_new_tokens=9)
        assert torch.equal(out[row, pad:], single[0])


def test_alone_stops_at_the_end_and_samples_by_seed(pair):
    ids = prompt(2, 6)
    said = pair.generate(ids, speculative=False, max_new_tokens=10)
    stop = int(said[0, 9])
    out = pair.generate(ids, speculative=False, max_new_tokens=10, eos_token_id=stop, pad_token_id=0)
    first = said[0, 6:].tolist().index(stop)
    assert out[0, 6 : 7 + first].tolist() == said[0, 6 : 7 + first].tolist() and not out[0, 7 + first :].any()
    config = pair.primary.generation_config
    try:  # the model's own end and padding, as in generate() of transformers
        config.eos_token_id, config.pad_token_id = stop, 0
        assert torch.equal(pair.generate(ids, speculative=False, max_new_tokens=10), out)
    finally:
        config.eos_token_id = config.pad_token_id = None
    draws = [
        pair.generate(
            ids,
            speculative=False,
            max_new_tokens=10,
            do_sample=True,
            temperature=1.5,
            top_k=9,
            top_p=0.9,
            generator=torch.Generator().manual_seed(s),
        )
        for s in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert torch.equal(pair.generate(ids, speculative=False, max_new_tokens=0), ids)


def test_a_prompt_of_one_token(pair):
    ids = prompt(1, 1)
    assert pair.generate(ids, speculative=False, max_new_tokens=5).shape == (1, 6)
    assert torch.equal(
        pair.generate(ids, do_sample=False, max_new_tokens=5),
        pair.primary.generate(ids, do_sample=False, max_new_tokens=5),
    )


# -- training ----------------------------------------------------------------------------------------------------------


def test_a_trainer_trains_in_two_stages_and_its_checkpoint_loads(tmp_path):
    torch.manual_seed(0)
    model = TandemModel(llama(3, 48, 1), llama(1, 32, 2), TandemConfig(block_size=2))
    data = [{"input_ids": row} for row in prompt(64, 16, 4)]
    before = {k: v.clone() for k, v in model.primary.state_dict().items()}
    args = training_arguments(tmp_path, max_steps=20, per_device_train_batch_size=16, learning_rate=1e-2, save_steps=20)
    assert args.weight_decay == 0.01 and args.max_grad_norm == 1.0
    trainer = TandemTrainer(model, args, train_dataset=data, block_sizes=(1, 2, 4))
    weights = []
    real = trainer._weight
    trainer._weight = lambda: weights.append(real()) or weights[-1]
    start = float(model.eval()(prompt(64, 16, 4), labels=prompt(64, 16, 4)).loss)
    trainer.train()
    assert weights == [0.0] * 10 + [0.5] * 10
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    assert rates[0] == pytest.approx(10 * rates[1])
    assert float(model.eval()(prompt(64, 16, 4), labels=prompt(64, 16, 4)).loss) < start
    assert all(torch.equal(v, before[k]) for k, v in model.primary.state_dict().items())
    again = TandemModel.load(tmp_path / "checkpoint-20", model.primary)
    ids = prompt(2, 8)
    assert torch.equal(again(ids).logits, model(ids).logits)
    loss, out = trainer.compute_loss(model, {"input_ids": ids}, return_outputs=True)
    assert loss == out.loss


@pytest.mark.parametrize("frozen", [True, False])
def test_training_is_resumed_and_the_best_checkpoint_found_again(tmp_path, frozen):
    data = [{"input_ids": row} for row in prompt(64, 16, 4)]

    def trainer(steps, **more):
        model = TandemModel(llama(3, 48, 1), llama(1, 32, 2), TandemConfig(freeze_primary=frozen))
        torch.manual_seed(3)
        with torch.no_grad():
            for linear in model.projections.maps:
                linear.weight.normal_(0, 0.02)
        options = {"max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 16, "lr_scheduler_type": "constant"}
        options |= {"lr_scheduler_kwargs": {}, "use_cpu": True, "learning_rate": 1e-2} | more
        return TandemTrainer(model, training_arguments(tmp_path, **options), train_dataset=data, eval_dataset=data[:16])

    through = trainer(6)
    through.train()
    resumed = trainer(6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 6
    for name, value in through.tandem.state_dict().items():
        assert_close(resumed.tandem.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    again = TandemModel.load(tmp_path / "checkpoint-6", through.tandem.primary if frozen else None)
    assert torch.equal(again(prompt()).logits, through.tandem.eval()(prompt()).logits)
    # A learning rate that destroys the model makes an early checkpoint the best.
    best = trainer(6, learning_rate=1.0, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True)
    best.train()
    losses = [row["eval_loss"] for row in best.state.log_history if "eval_loss" in row]
    assert float(best.evaluate()["eval_loss"]) == pytest.approx(min(losses), rel=1e-5)


def test_training_makes_drafts_better():
    """A primary that repeats a pattern in context, and a secondary of one layer that cannot: the tandem can."""
    torch.manual_seed(0)
    primary, secondary = llama(2, 32, 1, spread=0.05), llama(1, 32, 2, spread=0.05)
    model = TandemModel(primary, secondary)

    def batch(seed):
        return prompt(64, 8, seed).repeat(1, 3)

    optimizer = torch.optim.AdamW(primary.requires_grad_(True).parameters(), 1e-2)
    for step in range(120):
        optimizer.zero_grad()
        primary(batch(step), labels=batch(step)).loss.backward()
        optimizer.step()
    primary.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    for step in range(120):
        optimizer.zero_grad()
        model(batch(1000 + step), labels=batch(1000 + step), distil_weight=0.0).loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        ids = batch(5000)
        late = slice(12, 23)
        first = (primary(ids).logits.argmax(-1)[:, late] == ids[:, 13:24]).float().mean()
        out = model(ids)
        tandem = (out.logits.argmax(-1)[:, late] == out.primary_logits.argmax(-1)[:, late]).float().mean()
        alone = (secondary(ids).logits.argmax(-1)[:, late] == out.primary_logits.argmax(-1)[:, late]).float().mean()
    assert tandem > alone + 0.1, (float(first), float(tandem), float(alone))


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": prompt(2)}, "inputs hold 2 sequences"),
        ({"inputs": prompt()[0]}, r"inputs must be \[1, tokens\]"),
        ({"draft_length": 0}, "draft_length must be an integer of at least 1"),
        ({"adaptive": 1.5}, r"adaptive as a probability must lie in \[0, 1\]"),
        ({"adaptive": "often"}, "adaptive must be a Router, a probability or None"),
        ({"num_beams": 3}, "num_beams must be 1"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences must be 1"),
        ({"free_token": True}, "free_token is for speculative=False"),
        ({"speculative": False, "adaptive": 0.5}, "adaptive is for speculative=True"),
        ({"speculative": False, "max_new_tokens": -1}, "max_new_tokens must not be negative"),
        ({"speculative": False, "attention_mask": torch.tensor([[1] * 8 + [0]])}, "zeros on the left"),
        ({"speculative": False, "inputs": prompt()[:, :0]}, "at least one token"),
    ],
)
def test_bad_input_of_generate(pair, options, message):
    with pytest.raises(ValueError, match=message):
        pair.generate(**{"inputs": prompt()} | options)


def test_other_bad_input(pair, tmp_path):
    with pytest.raises(ValueError, match="label must be 'soft' or 'hard'"):
        fit_router(pair, prompt(), label="medium")
    with pytest.raises(ValueError, match="data is empty"):
        fit_router(pair, [])
    with pytest.raises(ValueError, match="threshold must lie"):
        Router(2.0)
    with pytest.raises(ValueError, match="top_k and hidden"):
        Router(top_k=0)
    with pytest.raises(TypeError, match="model must be a TandemModel, not LlamaForCausalLM"):
        TandemTrainer(pair.primary)
    for options in ({"distil_after": 2}, {"block_sizes": (0,)}):
        with pytest.raises(ValueError, match=next(iter(options))):
            TandemTrainer(pair, training_arguments(tmp_path), **options)


def test_a_failing_generation_leaves_the_primary_as_it_was(pair):
    with pytest.raises(ZeroDivisionError), drafting(pair):
        raise ZeroDivisionError
    assert "_get_candidate_generator" not in vars(pair.primary)

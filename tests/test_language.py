"""Language models: what their batches hold, what is refused, and the networks against torch's own and closed forms."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from builders import options_and_recipe
from toolbox import data_root, make_spec
from torch import nn

from bstune.core.errors import ConfigError, DataError
from bstune.trial.workload import build_module
from bstune.workloads.language import (
    LanguageModel,
    Lstm,
    Text,
    TextData,
    Transformer,
    _attend,
    load_text,
    load_tiny_shakespeare,
)

# Of a sweep: a change elsewhere seldom breaks it, and CI runs it.
pytestmark = pytest.mark.slow

TOKENS = np.random.default_rng(0).integers(0, 7, 500)
SIZES = {"vocabulary": 7, "context": 8, "layers": 2, "width": 12, "heads": 3}


def text(train=TOKENS, validation=TOKENS[:90], test=TOKENS[:90], vocabulary=7):
    return Text("a.txt", vocabulary, train, validation, test)


def data(of=None, **options):
    values = {"vocabulary": 7, "context": 8, "validation": 5, "eval_batch_size": 2} | options
    return TextData(load=lambda: of or text(), device="cpu", **values)


def drawn(batches, count):
    """The first batches, each with its targets' last token behind it: whole sequences."""
    found = []
    for _, (tokens, targets) in zip(range(count), batches, strict=False):
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        assert tokens.dtype == targets.dtype == torch.int64
        found.append(torch.cat([tokens, targets[:, -1:]], dim=1))
    return found


@pytest.mark.parametrize(("stride", "train_tokens"), [(1, None), (1, 60), (3, None), (8, 97)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("resident", [True, False])
def test_an_epoch_has_every_sequence_once(stride, train_tokens, dtype, resident):
    of = text(train=TOKENS.astype(dtype))
    module = data(of, stride=stride, train_tokens=train_tokens, resident=resident)
    # A sequence is 8 tokens and the target of the last one.
    there = torch.from_numpy(TOKENS[:train_tokens]).unfold(0, 9, stride)
    assert module.train_size == len(there)
    size = 4
    whole, rest = divmod(module.train_size, size)
    found = torch.cat(drawn(module.train_batches(size, None, 0), whole + bool(rest)))[
        : module.train_size
    ]
    assert sorted(found.tolist()) == sorted(there.tolist())
    # The sequences are the same in another order.
    assert not torch.equal(found, there)


def test_the_order_depends_on_the_seed_alone():
    first = drawn(data().train_batches(10, None, 0), 5)
    for module, seed, same in (
        (data(), 0, True),
        (data(resident=False), 0, True),
        (data(), 1, False),
    ):
        assert (
            torch.equal(torch.cat(first), torch.cat(drawn(module.train_batches(10, None, seed), 5)))
            == same
        )
    micro = drawn(data().train_batches(10, 4, 0), 15)
    assert list(map(len, micro[:3])) == [4, 4, 2]
    assert torch.equal(torch.cat(first), torch.cat(micro))


@pytest.mark.parametrize("done", [0, 1, 49, 60])
def test_a_stream_goes_on_from_a_position(done):
    batches = data().train_batches(10, None, 3)
    again = data().train_batches(10, None, 3)
    drawn(batches, done)
    again.stream.resume(batches.stream.position(done))
    assert torch.equal(torch.cat(drawn(batches, 3)), torch.cat(drawn(again, 3)))


def test_the_target_is_measured_on_sequences_that_do_not_overlap():
    module = data()
    module.setup("fit")
    for batches in (module.val_dataloader(), module.test_dataloader()):
        found = drawn(batches, 10)
        assert list(map(len, found)) == [2, 2, 1]
        assert len(batches) == 3
        # Five sequences lie evenly over 89 tokens.
        expected = [TOKENS[start : start + 9].tolist() for start in range(0, 85, 17)]
        assert torch.cat(found).tolist() == expected
    assert (module.validation_size, len(data(text(test=None)).test_dataloader())) == (5, 0)


@pytest.mark.parametrize(
    ("of", "options", "error", "message"),
    [
        (
            text(train=np.append(TOKENS, 9)),
            {},
            DataError,
            "token 9 at place 500 of its train part is outside the voc",
        ),
        (
            text(validation=np.array([*range(7)] * 9 + [-1])),
            {},
            DataError,
            "token -1 at place 63 of its validation pa",
        ),
        (
            text(test=TOKENS[:90] + 1),
            {},
            DataError,
            "outside the vocabulary, 0 to 6: set workload.data.vocabulary=8",
        ),
        (
            text(vocabulary=8),
            {},
            DataError,
            r"a\.txt has 8 different tokens, more than workload\.data\.vocabulary=7: set",
        ),
        (
            text(train=TOKENS[:8]),
            {},
            DataError,
            r"a\.txt is too short, or cut short: its train part has 8 tokens, but a ",
        ),
        (
            # 5 x 8 + 1 = 41.
            text(test=TOKENS[:40]),
            {},
            DataError,
            "its test part has 40 tokens, but 5 sequences of .*context=8 tokens take 41",
        ),
        (
            None,
            {"train_tokens": 501},
            ConfigError,
            r"workload\.data\.train_tokens must be at most the 500 tokens that",
        ),
        (
            None,
            {"train_tokens": 0},
            ConfigError,
            r"workload\.data\.train_tokens must be a positive integer, but got 0",
        ),
        (
            None,
            {"context": 1.5},
            ConfigError,
            r"workload\.data\.context must be a positive integer, but got 1\.5",
        ),
        (
            None,
            {"stride": 0},
            ConfigError,
            r"workload\.data\.stride must be a positive integer, but got 0",
        ),
    ],
)
def test_what_cannot_be_is_refused(of, options, error, message):
    with pytest.raises(error, match=message) as raised:
        data(of, **options).prepare_data()
    assert "\n" not in str(raised.value)


def test_a_text_of_ones_own(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("bäc\n" * 25, encoding="utf-8")
    found = load_text(path)
    assert (found.vocabulary, len(found.train), len(found.validation), len(found.test)) == (
        4,
        90,
        5,
        5,
    )
    # By code points: the newline, b, c, ä.
    assert found.train[:4].tolist() == [1, 3, 2, 0]
    path.write_text("abc\n" * 25 + "x", encoding="utf-8")
    with pytest.raises(
        DataError,
        match=r"mine\.txt, line 26: 'x' is outside the vocabulary, the 4 characters of the",
    ):
        load_text(path)
    path.write_bytes(b"ab\xff")
    with pytest.raises(DataError, match=r"mine\.txt is not text in UTF-8, from byte 2 on"):
        load_text(path)
    with pytest.raises(DataError, match=r"load\.path=.*nowhere cannot be read: No such file"):
        load_text(tmp_path / "nowhere")


def test_tiny_shakespeare():
    found = load_tiny_shakespeare(data_root("tinyshakespeare"))
    sizes = found.vocabulary, len(found.train), len(found.validation), len(found.test)
    # 1,115,394 characters, of which 90, 5 and 5%.
    assert sizes == (65, 1_003_854, 55_770, 55_770)
    letters = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    assert "".join(letters[token] for token in found.train[:14]) == "First Citizen:"
    assert found.test[-1] == 0


def test_a_published_text_that_is_cut_short_is_named(tmp_path):
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare" / "input.txt").write_bytes(b"First Citizen:\n")
    with pytest.raises(
        DataError, match=r"tinyshakespeare/input\.txt is not the published file: its sha256"
    ):
        load_tiny_shakespeare(tmp_path)


# Models


def as_torch_has_it(model):
    """Torch's own encoder with a Transformer's weights."""
    layer = partial(
        nn.TransformerEncoderLayer,
        dropout=0.0,
        activation="gelu",
        batch_first=True,
        norm_first=True,
    )
    blocks = []
    for block in model.blocks:
        ours = layer(SIZES["width"], SIZES["heads"], 4 * SIZES["width"])
        for theirs, mine in (
            (ours.self_attn.out_proj, block.attention_residual),
            (ours.linear1, block.hidden),
            (ours.linear2, block.hidden_residual),
            (ours.norm1, block.attention_norm),
            (ours.norm2, block.hidden_norm),
        ):
            theirs.load_state_dict(mine.state_dict())
        attention = {"in_proj_weight": block.attention.weight, "in_proj_bias": block.attention.bias}
        ours.self_attn.load_state_dict(attention, strict=False)
        blocks.append(ours)
    return blocks


def test_the_transformer_is_torchs_with_a_causal_mask():
    torch.manual_seed(0)
    model = Transformer(**SIZES)
    # Far from its start every part of the model shows.
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    tokens = torch.randint(7, (5, 6))
    stream = model.tokens(tokens) + model.places[:6]
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    for block in as_torch_has_it(model):
        stream = block(stream, src_mask=mask, is_causal=True)
    torch.testing.assert_close(model(tokens), model.head(model.norm(stream)), rtol=1e-4, atol=1e-5)


def test_attention_in_bfloat16_is_that_in_float32_but_for_rounding():
    torch.manual_seed(0)
    # The dimensions are sequences, heads, tokens and the width of a head.
    shape = (4, 3, 6, 5)
    of_each = torch.randn(shape, dtype=torch.bfloat16)
    parts = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    exact = [part.detach().float().requires_grad_() for part in parts]
    for attended, scale in (_attend(*parts), of_each), (_attend(*exact), of_each.float()):
        (attended * scale).sum().backward()
    # bfloat16 has 8 bits, so that each rounding is of 0.4%.
    assert _attend(*parts).dtype == torch.bfloat16
    torch.testing.assert_close(_attend(*parts).float(), _attend(*exact), rtol=0.02, atol=0.02)
    for part, reference in zip(parts, exact, strict=True):
        torch.testing.assert_close(part.grad.float(), reference.grad, rtol=0.05, atol=0.05)


MODELS = {
    "transformer": lambda: Transformer(**SIZES),
    "lstm": lambda: Lstm(vocabulary=7, embedding=4, width=6, layers=2),
    "projected lstm": lambda: Lstm(vocabulary=7, embedding=4, width=6, layers=1, projection=3),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_no_place_sees_what_comes_after_it(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    tokens = torch.randint(7, (3, 8))
    before = model(tokens)
    assert before.shape == (3, 8, 7)
    for place in range(8):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % 7
        same = (model(changed) == before).all(dim=2).all(dim=0)
        assert same[:place].all()
        assert not same[place:].any()


def test_the_start_of_the_workloads():
    """Weights as many as the layers have, and a loss near ln 65, as of a model that knows nothing."""
    width = 128
    vocabulary = 65
    context = 64
    # 12 w^2 in matrices, 9 w in biases and 4 w in two norms.
    blocks = 4 * (12 * width**2 + 13 * width)
    expected = {
        "shakespeare_transformer": 2 * vocabulary * width + context * width + blocks + 2 * width,
        # The embedding, four gates with two biases each, and the head.
        "shakespeare_lstm": 65 * 64 + 4 * 128 * (64 + 128 + 2) + 65 * 128 + 65,
    }
    for name, weights in expected.items():
        composed = options_and_recipe(f"+workload={name}", "device=cpu")
        torch.manual_seed(0)
        module = build_module(*composed, make_spec(8, 1e-3))
        assert sum(parameter.numel() for parameter in module.parameters()) == weights
        tokens = torch.randint(65, (8, 65))
        loss = module.training_step((tokens[:, :-1], tokens[:, 1:]), 0)
        assert loss.item() == pytest.approx(math.log(65), rel=0.03)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 13}, r"workload\.module\.model\.width=13 must be a multiple of heads=3"),
        ({"layers": 0}, r"workload\.module\.model\.layers must be a positive integer, but got 0"),
    ],
)
def test_sizes_that_no_transformer_has(options, message):
    with pytest.raises(ConfigError, match=message):
        Transformer(**(SIZES | options))
    with pytest.raises(ConfigError, match=r"projection must be from 0 to below width=6, but got 6"):
        Lstm(vocabulary=7, embedding=4, width=6, layers=1, projection=6)


def test_metrics_are_means_over_tokens():
    module = LanguageModel(MODELS["transformer"](), nn.CrossEntropyLoss(), torch.optim.SGD, 0.1)
    logged = {}
    module.log_dict = logged.update
    source = data()
    batches = list(source.val_dataloader())
    with torch.no_grad():
        for number, batch in enumerate(batches):
            module.validation_step(batch, number)
        module.on_validation_epoch_end()
        tokens, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        logits = module(tokens).flatten(0, 1)
    assert logged["val/error"].item() == pytest.approx(
        (logits.argmax(1) != targets.flatten()).float().mean().item()
    )
    torch.testing.assert_close(
        logged["val/loss"], nn.functional.cross_entropy(logits, targets.flatten())
    )

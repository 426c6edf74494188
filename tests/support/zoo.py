"""Networks that nobody here wrote, and plain ones of torch: the rows of the table in docs/models.md."""

import importlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import consilience as cs
from consilience.runs.run import Run

EACH = (12, 8, 5)  # examples of each client
BATCH = 8  # batches of 8, 8 and 5 examples, so that there is padding, and one of 4: enough for BatchNorm


@dataclass(frozen=True)
class Row:
    """A line of the table: a package, a network, what is special about it, and how to make module and inputs.

    y: Makes targets of inputs; by default, labels of `classes` classes.
    lr: Steps that move the weights and keep networks with BatchNorm from growing.
    curved: Also run by FedEP(Laplace), which needs the gradients of single examples.
    """

    package: str
    name: str
    about: str
    make: Callable[[], nn.Module]
    x: Callable[[int], Any]
    classes: int = 3
    task: Callable[[nn.Module], Any] = cs.Classification
    y: Callable[[Any], Any] | None = None
    lr: float = 0.05
    curved: bool = False
    tolerance: float = 1e-9
    """The largest distance: BatchNorm over few examples, layer after layer, amplifies rounding."""

    @property
    def id(self) -> str:
        return f"{self.package}: {self.name}"


def torchvision() -> Any:
    """torchvision, whose compiled operators may not fit the build of torch: its networks do not need them, but its
    import looks for them by name. `make setup` puts it where nothing else finds it."""
    where = str(Path(sys.prefix) / "models")
    if where not in sys.path:
        sys.path.append(where)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module("torchvision")
        except RuntimeError:
            pass
        library = torch.library.Library("torchvision", "FRAGMENT")
        for _ in range(20):
            try:
                found = importlib.import_module("torchvision")
            except RuntimeError as error:
                name = str(error).split("torchvision::")[1].split()[0]
                library.define(f"{name}(Tensor x) -> Tensor")
            else:
                globals()["_library"] = library  # operators live as long as their library
                return found
    raise ImportError("torchvision cannot be imported")


def images(side: int, channels: int = 3) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, channels, side, side)


def tokens(length: int, vocabulary: int = 50) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(3, vocabulary, (n, length))


def sentences(mask: str | None = None, vocabulary: int = 20) -> Callable[[int], Any]:
    """Rows of 2 to 7 tokens."""

    def make(n: int) -> cs.Ragged | dict[str, cs.Ragged]:
        rows = [torch.randint(3, vocabulary, (int(length),)) for length in torch.randint(2, 8, (n,))]
        return {"input_ids": cs.Ragged(rows, mask=mask)} if mask else cs.Ragged(rows)

    return make


def following(x: Any) -> cs.Ragged:
    """The token after each token of a row, and none after the last."""
    rows = x["input_ids"]
    return cs.Ragged([torch.cat([rows[i][1:], torch.tensor([-100])]) for i in range(len(rows))], padding=-100)


def numbers(x: Tensor) -> Tensor:
    return torch.randn(len(x))


def survival(x: Tensor) -> Tensor:
    """Times, and whether there was an event."""
    return torch.stack([torch.rand(len(x)) + 0.1, (torch.rand(len(x)) < 0.7).float()], 1)


def huber(output: Tensor, y: Tensor) -> Tensor:
    return F.huber_loss(output.squeeze(1), y, reduction="none")


def masked(length: int, vocabulary: int = 50) -> Callable[[int], dict[str, Tensor]]:
    def make(n: int) -> dict[str, Tensor]:
        mask = (torch.arange(length) < torch.randint(2, length + 1, (n, 1))).long()
        return {"input_ids": tokens(length, vocabulary)(n) * mask, "attention_mask": mask}

    return make


def vision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torchvision()
        models = importlib.import_module("torchvision.models")
        return getattr(models, name)(num_classes=3, **options)

    return make


def resnet() -> nn.Module:
    torchvision()
    parts = importlib.import_module("torchvision.models.resnet")
    return parts.ResNet(parts.BasicBlock, [1, 1, 1, 1], num_classes=3)


def convnext() -> nn.Module:
    torchvision()
    parts = importlib.import_module("torchvision.models.convnext")
    blocks = [parts.CNBlockConfig(16, 32, 2), parts.CNBlockConfig(32, None, 2)]
    return parts.ConvNeXt(blocks, stochastic_depth_prob=0.3, num_classes=3)


def timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torchvision()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("timm").create_model(name, num_classes=3, **options)

    return make


SIZES = {
    "Bert": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
    "DistilBert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
}


def hugging(kind: str, head: str = "ForSequenceClassification") -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        hub = importlib.import_module("transformers")
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} if kind == "GPT2" else {"pad_token_id": 0}
        config = getattr(hub, f"{kind}Config")(vocab_size=50, num_labels=3, **special, **SIZES[kind])
        return getattr(hub, f"{kind}{head}")(config)

    return make


def adapted(kind: str, targets: list[str]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        peft = importlib.import_module("peft")
        config = peft.LoraConfig(r=2, target_modules=targets, task_type="SEQ_CLS", lora_dropout=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft uses names that transformers deprecates
            return peft.get_peft_model(hugging(kind)(), config)

    return make


class Encoder(nn.Module):
    """nn.TransformerEncoder over embedded tokens, with a mask of the padding."""

    def __init__(self, dropout: float = 0.1, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = None if attention_mask is None else attention_mask == 0
        out = self.layers(self.embedding(input_ids), src_key_padding_mask=hidden)
        return self.head(out[:, 0])


class Recurrent(nn.Module):
    """A recurrent layer over sequences of vectors; its last output is classified."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer = kind(4, 6, batch_first=True, **options)
        self.head = nn.Linear(12 if options.get("bidirectional") else 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Packed(nn.Module):
    """A recurrent layer over rows of different lengths; the output at the last token of each is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(20, 4), nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        out = self.layer(self.embedding(ids))[0]
        last = (lengths - 1).clamp_min(0).view(-1, 1, 1).expand(-1, 1, out.shape[-1])
        return self.head(out.gather(1, last).squeeze(1))


class Causal(nn.Module):
    """A small language model with causal attention and a mask of the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(20, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        self.head = nn.Linear(8, 20)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.head(self.layer(x, src_mask=later, src_key_padding_mask=attention_mask == 0))


class MeanAndVariance(nn.Module):
    """Two heads: the module returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.log_var = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.body(x).tanh()
        return self.mean(seen), self.log_var(seen)


class TwoInputs(nn.Module):
    """An image and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.vector, self.head = nn.Conv2d(1, 4, 3), nn.Linear(5, 8), nn.Linear(4 + 8, 3)

    def forward(self, image: Tensor, vector: Tensor) -> Tensor:
        seen = self.image(image).relu().mean((-2, -1))
        return self.head(torch.cat([seen, self.vector(vector).tanh()], 1))


class Tied(nn.Module):
    """A language model whose input and output embeddings are one matrix; the last token is predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(ids)).tanh().mean(1))


class Attention(nn.Module):
    """F.scaled_dot_product_attention and F.dropout, called by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(4, 24), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(F.dropout(out, 0.2, self.training).mean(1))


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, outputs))


def vectors(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape)


ROWS = [
    Row("torchvision", "ResNet (4 blocks)", "BatchNorm", resnet, images(16), lr=0.002),
    Row("torchvision", "mobilenet_v3_small (half width)", "BatchNorm, squeeze and excitation, dropout",
        vision("mobilenet_v3_small", width_mult=0.5), images(16), lr=0.001),
    Row("torchvision", "ConvNeXt (4 blocks)", "stochastic depth, layer scale of 1e-6", convnext, images(32)),
    Row("torchvision", "VisionTransformer (4 layers)", "nn.MultiheadAttention, dropout", vision(
        "VisionTransformer", image_size=16, patch_size=8, num_layers=4, num_heads=2, hidden_dim=16, mlp_dim=32,
        dropout=0.1, attention_dropout=0.1), images(16), curved=True),
    Row("timm", "mobilenetv2_035", "BatchNormAct2d, stochastic depth", timm("mobilenetv2_035", drop_path_rate=0.2),
        images(48), lr=0.0005, tolerance=1e-7),
    Row("timm", "vit_tiny_patch16_224 (2 layers)", "fused attention, stochastic depth", timm(
        "vit_tiny_patch16_224", img_size=32, depth=2, drop_path_rate=0.2), images(32)),
    Row("transformers", "BERT", "attention mask, dropout", hugging("Bert"), masked(7), curved=True),
    Row("transformers", "DistilBERT", "attention mask, dropout", hugging("DistilBert"), masked(7), curved=True),
    Row("transformers", "GPT-2", "causal attention, dropout", hugging("GPT2"), masked(7), curved=True),
    Row("transformers", "GPT-2, language model", "tied weights, rows of different lengths with a mask",
        hugging("GPT2", "LMHeadModel"), sentences("attention_mask"), task=cs.LanguageModel, y=following, lr=0.01,
        curved=True),
    Row("peft", "LoRA on BERT", "frozen weights are shared, dropout", adapted("Bert", ["query", "value"]), masked(7),
        curved=True),
    Row("torch", "nn.TransformerEncoder", "attention mask, dropout", Encoder, masked(7), curved=True),
    Row("torch", "F.scaled_dot_product_attention", "causal, F.dropout", Attention, vectors(5, 4), curved=True),
    Row("torch", "nn.LSTM", "two layers, both directions, dropout",
        lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.2), vectors(5, 4), curved=True),
    Row("torch", "nn.GRU", "two layers", lambda: Recurrent(nn.GRU, num_layers=2), vectors(5, 4), curved=True),
    Row("torch", "nn.RNN", "one layer", lambda: Recurrent(nn.RNN), vectors(5, 4), curved=True),
    Row("torch", "nn.BatchNorm1d", "estimated statistics", lambda: nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)), vectors(4), curved=True),
    Row("torch", "nn.BatchNorm2d, averaged", "running averages are part of the weights", lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)), images(6, 1),
        task=lambda m: cs.Classification(m, batch_norm="averaged")),
    Row("torch", "nn.LSTM over rows of different lengths", "module(ids, lengths)", Packed,
        lambda n: cs.Ragged(sentences()(n), lengths="lengths"), curved=True),
    Row("torch", "language model", "causal attention, rows of different lengths with a mask", Causal,
        sentences("attention_mask"), task=cs.LanguageModel, y=following, lr=0.01, curved=True),
    Row("torch", "two inputs", "module(image, vector)", TwoInputs,
        lambda n: (torch.randn(n, 1, 6, 6), torch.randn(n, 5)), curved=True),
    Row("torch", "two outputs", "a tuple; Heteroscedastic", MeanAndVariance, vectors(4), task=cs.Heteroscedastic,
        y=numbers, curved=True),
    Row("torch", "tied weights", "one matrix in two places", Tied, tokens(6, 20), classes=20, curved=True),
    Row("torch", "own loss", "a function of (output, y)", lambda: mlp(1), vectors(4),
        task=lambda m: cs.Supervised(m, loss=huber, predict=lambda output: output), y=numbers),
    Row("torch", "Cox", "the loss of a batch as a whole", lambda: mlp(1), vectors(4), task=cs.Cox, y=survival),
]  # fmt: skip


def federation(row: Row) -> cs.Federation:
    """Three clients with different numbers of examples."""
    torch.manual_seed(1)
    x = row.x(sum(EACH))
    y = torch.randint(row.classes, (sum(EACH),)) if row.y is None else row.y(x)
    return cs.Federation.from_owner(cs.Dataset(x, y), torch.arange(len(EACH)).repeat_interleave(torch.tensor(EACH)))


def task(row: Row) -> Any:
    torch.manual_seed(0)
    return row.task(row.make())


def methods(row: Row) -> dict[str, cs.Algorithm]:
    """The methods that a row runs by name."""
    train = cs.SGD(lr=row.lr, epochs=1, batch_size=BATCH)
    curved = {"FedEP(L)": cs.FedEP(cs.inference.Laplace(train, kappa=1.0, s0=1.0, epochs=1, batch_size=BATCH))}
    return {"FedAvg": cs.FedAvg(train), "FedEP": cs.FedEP(cs.inference.Identity(train))} | (
        curved if row.curved else {}
    )


def learned(row: Row, method: cs.Algorithm, chunk: int) -> Run:
    """Two rounds in float64, with `chunk` clients at once."""
    fed = federation(row)
    engine = cs.Simulator(device="cpu", precision="float64", chunk=chunk, workers=1)
    return cs.fit(method, task(row), fed, rounds=2, test=fed.data, engine=engine, evaluate_every=2, progress=False)


def apart(one: Run, other: Run) -> float:
    """The distance of the weights of two runs, relative to the distance that they have moved."""
    start = one.task.initial().double()
    moved = float((one.posterior.mean - start).norm())
    assert 0 < moved < float("inf")
    return float((one.posterior.mean - other.posterior.mean).norm()) / moved

"""Networks that nobody here wrote, and plain ones of torch: the rows of the table in docs/models.md."""

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import consilience as cs

CLIENTS, EACH = 3, (5, 4, 2)  # examples of each client: batches of different sizes, so that there is padding


@dataclass(frozen=True)
class Row:
    """A line of the table: a package, a network, what is special about it, and how to make module and inputs."""

    package: str
    name: str
    about: str
    make: Callable[[], nn.Module]
    x: Callable[[int], Any]
    classes: int = 3
    task: Callable[[nn.Module], Any] | None = None
    y: Callable[[int], Tensor] | None = None


def torchvision() -> Any:
    """torchvision, whose compiled operators may not fit the build of torch: its networks do not need them, but its
    import looks for them by name."""
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


def timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torchvision()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("timm").create_model(name, num_classes=3, **options)

    return make


def bert(kind: str = "Bert", lora: bool = False, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        hub = importlib.import_module("transformers")
        sizes = {
            "Bert": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
            "DistilBert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
            "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
        }[kind]
        config = getattr(hub, f"{kind}Config")(vocab_size=50, num_labels=3, pad_token_id=0, **sizes)
        module = getattr(hub, f"{kind}ForSequenceClassification")(config)
        if not lora:
            return module
        peft = importlib.import_module("peft")
        return peft.get_peft_model(module, peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS"))

    return make


class Encoder(nn.Module):
    """nn.TransformerEncoder over embedded tokens, with a mask of the padding."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
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


ROWS = [
    Row("torchvision", "resnet18", "BatchNorm", vision("resnet18"), images(32)),
    Row("torchvision", "mobilenet_v3_small", "BatchNorm, squeeze and excitation, dropout",
        vision("mobilenet_v3_small"), images(32)),
    Row("torchvision", "convnext_tiny", "stochastic depth, layer scale of 1e-6", vision("convnext_tiny"), images(32)),
    Row("torchvision", "vit (4 layers)", "nn.MultiheadAttention", vision(
        "VisionTransformer", image_size=16, patch_size=8, num_layers=4, num_heads=2, hidden_dim=16, mlp_dim=32,
        dropout=0.1, attention_dropout=0.1), images(16)),
    Row("timm", "efficientnet_lite0", "BatchNormAct2d", timm("efficientnet_lite0"), images(32)),
    Row("timm", "vit_tiny_patch16_224 (2 layers)", "fused attention, stochastic depth", timm(
        "vit_tiny_patch16_224", img_size=32, depth=2, drop_path_rate=0.2), images(32)),
    Row("transformers", "BERT", "attention mask, dropout", bert(), masked(7)),
    Row("transformers", "DistilBERT", "attention mask, dropout", bert("DistilBert"), masked(7)),
    Row("transformers", "GPT-2", "causal attention, dropout", bert("GPT2"), masked(7)),
    Row("peft", "LoRA on BERT", "frozen weights are shared", bert(lora=True), masked(7)),
    Row("torch", "nn.TransformerEncoder", "attention mask, dropout", Encoder, masked(7)),
    Row("torch", "F.scaled_dot_product_attention", "causal, F.dropout", Attention, lambda n: torch.randn(n, 5, 4)),
    Row("torch", "nn.LSTM", "two layers, both directions, dropout",
        lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.2), lambda n: torch.randn(n, 5, 4)),
    Row("torch", "nn.GRU", "two layers", lambda: Recurrent(nn.GRU, num_layers=2), lambda n: torch.randn(n, 5, 4)),
    Row("torch", "two inputs", "module(image, vector)", TwoInputs,
        lambda n: (torch.randn(n, 1, 6, 6), torch.randn(n, 5))),
    Row("torch", "tied weights", "one matrix in two places", Tied, tokens(6, 20), classes=20),
]  # fmt: skip


def federation(row: Row) -> cs.Federation:
    """Three clients with different numbers of examples."""
    n = sum(EACH)
    torch.manual_seed(1)
    x, y = row.x(n), torch.randint(row.classes, (n,)) if row.y is None else row.y(n)
    return cs.Federation.from_owner(cs.Dataset(x, y), torch.arange(CLIENTS).repeat_interleave(torch.tensor(EACH)))


def task(row: Row) -> Any:
    torch.manual_seed(0)
    return (row.task or cs.Classification)(row.make())

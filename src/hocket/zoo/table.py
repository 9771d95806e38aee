"""All entries of the zoo, from the smallest step to the largest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hocket.job import Job
from hocket.zoo import dcgan, images, language, pointnet
from hocket.zoo.base import Option, Request, ZooEntry

BERT = "Devlin et al., BERT, 2018; Turc et al., Well-Read Students Learn Better, 2019"
RESNET = "He et al., Deep Residual Learning for Image Recognition, 2015"
RESNET_V2 = "He et al., Identity Mappings in Deep Residual Networks, 2016"
LENET = "LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998"
DENSENET = "Huang et al., Densely Connected Convolutional Networks, 2016"
ALEXNET = "Krizhevsky et al., ImageNet Classification with Deep Convolutional Neural Networks, 2012"
CAFFENET = "Jia et al., Caffe: Convolutional Architecture for Fast Feature Embedding, 2014"
GOOGLENET = "Szegedy et al., Going Deeper with Convolutions, 2014"
MOBILENET_V2, MOBILENET_V3 = "Sandler et al., MobileNetV2, 2018", "Howard et al., Searching for MobileNetV3, 2019"
INCEPTION_V2 = "Ioffe & Szegedy, Batch Normalization, 2015"
INCEPTION_V3 = "Szegedy et al., Rethinking the Inception Architecture for Computer Vision, 2015"
VGG = "Simonyan & Zisserman, Very Deep Convolutional Networks, 2014"


def _side(default: int, minimum: int, note: str = "") -> Option:
    return Option("image_size", default, f"side of the square images, pixels{note}", minimum)


def _text(width: str, depth: str, sizes: tuple[int, int, int, int], min_vocab: int = 2) -> tuple[Option, ...]:
    """Make the options of a language model: the sizes are width, depth, steps and vocabulary."""
    return (
        Option("width", sizes[0], f"width of {width}"),
        Option("depth", sizes[1], depth),
        Option("steps", sizes[2], "tokens in a sequence"),
        Option("vocab", sizes[3], "different tokens", min_vocab),
    )


def _bert(name: str, width: int, depth: int, lr: float) -> ZooEntry:
    summary = f"BERT with {depth} layers of {width} and random weights, masked language model"
    options = _text("the layers, a multiple of 64", "layers", (width, depth, 128, 30_522), 3)
    return ZooEntry(name, summary, BERT, language.bert, 8, 8, "adamw", lr, options, "transformers")


def _pointnet(name: str, task: str, build: Callable[[Request], Job]) -> ZooEntry:
    summary = f"PointNet, {task} of generated clouds of 2,500 points"
    options = (
        Option("points", 2500, "points in a cloud", minimum=2),
        Option("width", 64, "channels of the first layer"),
    )
    return ZooEntry(name, summary, "Qi et al., PointNet, 2017", build, 32, 8, "adam", 1e-3, options)


def _images(
    name: str, title: str, source: str, build: Callable[[Request], Job], side: Option, batch_size: int, lr: float
) -> ZooEntry:
    summary = f"{title} on generated images, {side.default} x {side.default} pixels"
    return ZooEntry(name, summary, source, build, batch_size, lr=lr, options=(side,))


def _pytorchcv(
    name: str, title: str, source: str, place: str, batch_size: int, lr: float, side: Option | None = None
) -> ZooEntry:
    """Make the entry of a network of pytorchcv, given the place ``module.constructor`` of its constructor."""
    module, constructor = place.split(".")
    side = side or _side(224, 32)
    build = images.pytorchcv(module, constructor, side.default)
    return replace(_images(name, title, source, build, side, batch_size, lr), requires="pytorchcv")


ENTRIES = (
    ZooEntry(
        name="digits-cnn",
        summary="small convolutional net on real handwritten digits, 8 x 8 pixels",
        source="E. Alpaydin & C. Kaynak, Optical Recognition of Handwritten Digits, UCI 1998",
        build=images.digits_cnn,
        batch_size=64,
        num_batches=28,
        options=(Option("width", 16, "channels of the first convolution"),),
        requires="sklearn",
    ),
    _images("lenet", "LeNet-5", LENET, images.lenet, _side(28, 12), 64, 0.01),
    ZooEntry(
        name="mlp",
        summary="multilayer perceptron, 8 layers of 256, on generated vectors: small operations",
        source="D. Rumelhart, G. Hinton, R. Williams, Learning representations by back-propagating errors, 1986",
        build=images.mlp,
        batch_size=32,
        lr=0.01,
        options=(
            Option("depth", 8, "hidden layers"),
            Option("width", 256, "width of the inputs and of every hidden layer"),
        ),
    ),
    ZooEntry(
        name="lstm-cells",
        summary="language model, 2 layers of LSTM cells of 128 unrolled by hand over 16 steps: small operations",
        source="Hochreiter & Schmidhuber, Long Short-Term Memory, 1997",
        build=language.lstm_cells,
        batch_size=20,
        lr=0.5,
        options=_text("the embedding and of every cell", "layers of cells", (128, 2, 16, 100)),
    ),
    ZooEntry(
        name="lstm-lm",
        summary="language model, 2 LSTM layers of 200, 35 steps, gradients clipped",
        source="Zaremba et al., Recurrent Neural Network Regularization, 2014",
        build=language.lstm_lm,
        batch_size=20,
        lr=0.1,
        options=_text("the embedding and of every LSTM layer", "LSTM layers", (200, 2, 35, 10_000)),
    ),
    ZooEntry(
        name="transformer",
        summary="language model, 4 Transformer encoder layers of 256, dropout, tied embedding",
        source="Vaswani et al., Attention Is All You Need, 2017",
        build=language.transformer,
        batch_size=4,
        optimizer="adamw",
        lr=1e-3,
        options=(
            Option("width", 256, "width of the embedding and of every layer, whose inner width is four times that"),
            Option("depth", 4, "encoder layers"),
            Option("heads", 4, "attention heads"),
            Option("steps", 64, "tokens in a sequence"),
            Option("vocab", 10_000, "different tokens", minimum=2),
        ),
    ),
    _bert("bert-tiny", 128, 2, 1e-3),
    ZooEntry(
        name="dcgan",
        summary="generator and discriminator on generated images, 64 x 64 pixels, trained in one step",
        source="Radford et al., Deep Convolutional Generative Adversarial Networks, 2015",
        build=dcgan.build,
        batch_size=64,
        optimizer="adam",
        lr=2e-4,
        options=(_side(64, 8, ", a power of two"), Option("width", 64, "channels next to the image, in both models")),
    ),
    _pytorchcv("resnet20", "ResNet-20", RESNET, "resnet_cifar.resnet20_cifar10", 128, 0.05, _side(32, 8)),
    _pytorchcv(
        *("densenet40", "DenseNet-40, growth rate 12,", DENSENET, "densenet_cifar.densenet40_k12_cifar10", 64, 0.05),
        side=_side(32, 8),
    ),
    _images("alexnet", "AlexNet", ALEXNET, images.alexnet, _side(227, 67), 16, 0.002),
    _images("caffenet", "CaffeNet", CAFFENET, images.alexnet, _side(227, 67), 16, 0.002),
    _images("googlenet", "GoogLeNet", GOOGLENET, images.googlenet, _side(224, 32), 8, 0.005),
    _pointnet("pointnet-cls", "classification", pointnet.build_classifier),
    _pointnet("pointnet-seg", "segmentation", pointnet.build_segmenter),
    _bert("bert-medium", 512, 8, 1e-4),
    _pytorchcv("mobilenet-v2", "MobileNetV2", MOBILENET_V2, "mobilenetv2.mobilenetv2_w1", 8, 0.01),
    _pytorchcv("mobilenet-v3-large", "MobileNetV3-Large", MOBILENET_V3, "mobilenetv3.mobilenetv3_large_w1", 8, 0.01),
    *(
        _pytorchcv(f"resnet{n}", f"ResNet-{n}", RESNET, f"resnet.resnet{n}", batch_size, 0.002)
        for n, batch_size in ((18, 16), (34, 16), (50, 8), (101, 4), (152, 4))
    ),
    *(
        _pytorchcv(f"resnet{n}-v2", f"ResNet-{n} v2", RESNET_V2, f"preresnet.preresnet{n}", batch_size, 0.002)
        for n, batch_size in ((50, 8), (101, 4))
    ),
    *(_pytorchcv(f"vgg{n}", f"VGG-{n}", VGG, f"vgg.vgg{n}", 8, 0.002) for n in (11, 16, 19)),
    _pytorchcv("inception-v2", "Inception-v2 (BN-Inception)", INCEPTION_V2, "bninception.bninception", 8, 0.005),
    _pytorchcv("inception-v3", "Inception-v3", INCEPTION_V3, "inceptionv3.inceptionv3", 8, 0.005, _side(299, 75)),
)

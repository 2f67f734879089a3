"""Nets that an export must take apart: dropout, running statistics, frozen parts, branches."""

import torch
from torch import nn


class Busy(nn.Module):
    """Convolution, batch normalisation and three kinds of dropout, for 1×8×8 images."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Dropout2d(0.2), nn.MaxPool2d(4), nn.Flatten(), nn.Dropout(0.5)),
        )
        self.head = nn.Sequential(nn.Linear(4 * width, 10), nn.Dropout1d(0.0))
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x):
        return self.head[0](self.body(x) * self.scale)


class OnFeatures(nn.Module):
    """A linear head on a frozen body with kept features."""

    keep_features = True

    def __init__(self, width: int = 16):
        super().__init__()
        body = [nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.Tanh()]
        self.body = nn.Sequential(*body).requires_grad_(False).eval()
        self.head = nn.Linear(width, 10)

    def features(self, x):
        return self.body(x)

    def forward(self, x):
        return self.head(x if x.dim() == 2 else self.features(x))


class Undecided(nn.Linear):
    """Branches on the values of its inputs, so it cannot be traced."""

    def __init__(self):
        super().__init__(64, 10)

    def forward(self, x):
        if bool(x.sum() > 0):
            return super().forward(x.flatten(1))
        return -super().forward(x.flatten(1))


class TwoByTwo(nn.Linear):
    """Takes an even number of samples only."""

    def __init__(self):
        super().__init__(64, 10)

    def forward(self, x):
        return super().forward(x.flatten(1)).reshape(len(x) // 2, 2, 10).flatten(0, 1)

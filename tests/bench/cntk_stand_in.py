"""A stand-in for the package `cntk`: the part of its interface that the adapter uses, computed with torch.

Its rules are those that CNTK 2.7 was seen to follow: shapes have no batch axis, gradients are summed over
samples but averaged by a learner, and momentum is a unit-gain filter unless told otherwise.
"""

from types import SimpleNamespace

import numpy as np
import torch
from torch.nn import functional

__version__ = "2.7"
threads = []
MAX_POOLING, AVG_POOLING = "max", "average"
ops = SimpleNamespace(CONSTANT_PAD=0)
cntk_py = SimpleNamespace(set_max_num_cputhreads=threads.append)
device = SimpleNamespace(
    cpu=lambda: "CPU", try_set_default_device=lambda name: True, use_default_device=lambda: "CPU"
)


class Node:
    """A function of others, or a variable. A value has the batch first; that of a sequence is of one step."""

    def __init__(self, make, *inputs, shape=None, dynamic_axes=()):
        self.make, self.inputs, self.target, self.tensor = make, inputs, None, None
        self.dynamic_axes = max((one.dynamic_axes for one in inputs), key=len, default=tuple(dynamic_axes))
        if shape is None:
            zeros = [i.tensor if i.tensor is not None else torch.zeros(2, *i.shape) for i in inputs]
            shape = tuple(make(*zeros).shape[1:])
        self.shape, self.output = tuple(shape), self

    def __add__(self, other):
        return Node(lambda a, b: a + b, self, other)

    def __mul__(self, other):
        return Node(lambda a, b: a * b, self, other)

    @property
    def parameters(self):
        seen, left = {}, [self]
        while left:
            one = left.pop()
            if one not in seen:
                seen[one] = None
                left += [*one.inputs, *([one.target] if one.target else [])]
        return [one for one in seen if one.tensor is not None and one.tensor.requires_grad]

    def at(self, step, held, memo):
        """Return the value of a step."""
        if self.tensor is not None:
            return self.tensor
        if (self, step) not in memo:
            if self in held:
                value = held[self][:, step] if self.dynamic_axes == ("batch", "steps") else held[self]
            elif self.make == "past":
                size = (len(next(iter(held.values()))), *self.shape)
                value = self.inputs[0].at(step - 1, held, memo) if step else torch.zeros(size)
            elif self.make == "placeholder":
                value = self.target.at(step, held, memo)
            else:
                value = self.make(*(one.at(step, held, memo) for one in self.inputs))
            memo[self, step] = value
        return memo[self, step]

    def values(self, batch):
        """Return [samples], or [samples, steps] of sequences."""
        held = {variable: Value(given).tensor for variable, given in batch.items()}
        if self.dynamic_axes == ("batch",):
            return self.at(None, held, {})
        memo, steps = {}, next(iter(held.values())).shape[1]
        return torch.stack([self.at(step, held, memo) for step in range(steps)], dim=1)

    def forward(self, batch, outputs, keep):
        assert outputs == [self]
        assert keep == {self}
        values = self.values(batch)
        shown = values.detach().numpy()
        return values, {self: list(shown) if self.dynamic_axes == ("batch", "steps") else shown}

    def backward(self, state, root, wrt):
        wrt = list(wrt)
        gradients = torch.autograd.grad(
            state, [one.tensor for one in wrt], torch.tensor(np.array(root[self]))
        )
        return {one: gradient.numpy() for one, gradient in zip(wrt, gradients, strict=True)}

    def replace_placeholders(self, found):
        for place, node in found.items():
            assert node.shape == place.shape
            place.target = node
        return self


class Value:
    def __init__(self, given):
        self.tensor = (
            given.tensor if isinstance(given, Value) else torch.tensor(np.asarray(given, np.float32))
        )

    @staticmethod
    def one_hot(ids, classes):
        return Value(np.eye(classes, dtype=np.float32)[np.array(ids)])


class Trainer:
    def __init__(self, model, criteria, learners):
        self.loss, (self.learner,) = criteria[0], learners
        self.velocity = [torch.zeros_like(one.tensor) for one in self.learner.parameters]

    def train_minibatch(self, batch):
        loss = self.loss.values(batch).mean()  # a learner takes the mean gradient
        tensors = [one.tensor for one in self.learner.parameters]
        for place, gradient in enumerate(torch.autograd.grad(loss, tensors)):
            share = 1 - self.learner.momentum if self.learner.unit_gain else 1
            self.velocity[place] = self.learner.momentum * self.velocity[place] + share * gradient
            tensors[place].data -= self.learner.lr * self.velocity[place]
        self.previous_minibatch_loss_average = loss.item()
        return True


def momentum_sgd(parameters, lr, momentum, unit_gain=True):
    return SimpleNamespace(parameters=list(parameters), lr=lr, momentum=momentum, unit_gain=unit_gain)


def learning_parameter_schedule(value):
    return value


momentum_schedule = learning_parameter_schedule


def input_variable(shape):
    return Node(None, shape=shape if isinstance(shape, tuple) else (shape,), dynamic_axes=("batch",))


def parameter(shape, init):
    assert init.shape == shape
    node = Node(None, shape=shape)
    node.tensor = torch.tensor(np.asarray(init, np.float32), requires_grad=True)
    return node


def constant(value, shape=()):
    node = Node(None, shape=shape)
    node.tensor = torch.full(shape, float(value))
    return node


def placeholder(shape, dynamic_axes):
    return Node("placeholder", shape=shape, dynamic_axes=dynamic_axes)


sequence = SimpleNamespace(
    input_variable=lambda size: Node(None, shape=(size,), dynamic_axes=("batch", "steps")),
    past_value=lambda node: Node("past", node, shape=node.shape),
)


def times(x, w):
    assert len(x.shape) == 1
    return Node(torch.matmul, x, w)


def pad(x, pattern, mode, constant_value=0):
    assert mode == ops.CONSTANT_PAD
    sides = [size for pair in reversed(pattern) for size in pair]
    return Node(lambda x: functional.pad(x, sides, value=constant_value), x)


def convolution(w, x, strides, auto_padding):
    assert auto_padding == [False] * 3
    return Node(lambda w, x: functional.conv2d(x, w, stride=strides[1:]), w, x)


def pooling(x, kind, window, strides, auto_padding, ceil_out_dim):
    assert auto_padding == [False]
    pool = functional.max_pool2d if kind == MAX_POOLING else functional.avg_pool2d
    return Node(lambda x: pool(x, window, strides, ceil_mode=ceil_out_dim), x)


def batch_normalization(x, scale, bias, mean, var, spatial, *, epsilon, use_cudnn_engine, running_count):
    assert (spatial, use_cudnn_engine, running_count.shape) == (True, False, ())
    run = (torch.zeros(scale.shape), torch.ones(scale.shape))
    make = lambda x, *own: functional.batch_norm(x, *run, *own, training=True, eps=epsilon)  # noqa: E731
    return Node(make, x, scale, bias)


def reduce_mean(x, axis):
    return Node(lambda x: x.mean([one + 1 for one in axis], keepdim=True), x)


def reshape(x, shape):
    return Node(lambda x: x.reshape(len(x), *shape), x)


def slice(x, axis, begin, end, strides=None):
    if axis == -1:
        return Node(lambda x: x[..., begin:end], x)
    assert (axis, begin, tuple(end)) == ([1, 2], [0, 0], x.shape[1:])
    return Node(lambda x: x[:, :, :: strides[0], :: strides[1]], x)


def relu(x):
    return Node(torch.relu, x)


def sigmoid(x):
    return Node(torch.sigmoid, x)


def tanh(x):
    return Node(torch.tanh, x)


def cross_entropy_with_softmax(logits, targets):
    return Node(lambda x, y: -(functional.log_softmax(x, -1) * y).sum(-1), logits, targets)

"""Run by an arm's interpreter: how far MLX got in random graphs, for test_order.py.

A multiplication of bfloat16 matrices by index cannot be evaluated on the CPU: MLX raises when it
comes to it, and everything evaluated before has left the graph. So one failing node in a graph
shows which nodes run before it. Prints JSON lines: text, outputs, and the numbers of the nodes
(by their line in the text) that were left.
"""

import io
import json
import random
import sys

import mlx.core as mx


def graph(rng):
    leaves = [mx.ones((2, 2)) for _ in range(3)]
    mx.eval(leaves)
    made = list(leaves)
    bomb_at = rng.randrange(4, 60)
    weights = mx.ones((2, 2, 2), dtype=mx.bfloat16)
    zero = mx.array([0])
    mx.eval(weights, zero)
    bombs = []
    for i in range(60):
        recent = made[-rng.choice((3, 8, 60)) :]
        a, b = rng.choice(recent), rng.choice(recent)
        kind = rng.randrange(6)
        if i == bomb_at:
            bomb = mx.gather_mm(a.astype(mx.bfloat16)[None], weights, rhs_indices=zero)
            bombs.append(bomb)
            made.append(bomb[0].astype(mx.float32))
        elif kind == 0:
            made.extend(mx.split(mx.concatenate([a, b]), 2))
        elif kind == 1:
            made.extend(mx.divmod(a, b))
        elif kind == 2:
            made.append(mx.exp(a))
        elif kind == 3:
            made.append(mx.concatenate([a, b, a])[:2])
        else:
            made.append(a + b)
    outputs = [*rng.sample(made[3:], 3), made[-1], bombs[0]]
    rng.shuffle(outputs)
    return made, bombs, outputs


def text_of(arrays, names):
    file = io.StringIO()
    mx.export_to_dot(file, *arrays, **names)
    return file.getvalue()


def main(seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        made, bombs, outputs = graph(rng)
        identities = {hash(array): array for array in [*made, *bombs, *outputs]}
        names = {f"#{i}": array for i, array in enumerate(identities.values())}
        known = {hash(array): name for name, array in names.items()}
        before = text_of(outputs, names)
        try:
            mx.eval(*outputs)
        except RuntimeError:
            pass
        else:
            raise SystemExit("the failing node was evaluated")
        after = text_of(outputs, names)
        print(
            json.dumps(
                {
                    "before": before,
                    "after": after,
                    "outputs": [known[hash(array)] for array in outputs],
                    "bomb": known[hash(bombs[0])],
                }
            )
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

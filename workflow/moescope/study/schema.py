"""The study file: what is compared, on what, how, and which claims it must settle.

The models below are the schema; ``load`` turns their complaints into lines that name the key,
what stands there and what is allowed.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    field_validator,
    model_serializer,
    model_validator,
)

from ..runtimes.spec import CommandRuntime
from ..strict import known_keys

SCHEMA = "moescope/study/1"

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=48)]
Revision = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Package = Literal["mlx-lm", "mlx-vlm"]
Mode = Literal["affine", "mxfp4", "mxfp8", "nvfp4"]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        return known_keys(cls, data)


class About(Strict):
    """What the study is: its name is the record's, its session says "measure again"."""

    name: Name
    title: str
    question: str
    session: Annotated[int, Field(ge=1)] = 1


class Machine(Strict):
    """A machine class. Left out of the study, it is found once on this host."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]*$", max_length=64)]
    backend: Literal["cpu", "cuda", "metal"]
    gpu: str | None = None


class Quantisation(Strict):
    mode: Mode
    bits: Literal[2, 3, 4, 5, 6, 8]
    group_size: Literal[16, 32, 64, 128]


class QuantisationOverride(Strict):
    """For modules whose path matches (fnmatch); the last that matches decides."""

    match: str
    mode: Mode | None = None
    bits: Literal[2, 3, 4, 5, 6, 8] | None = None
    group_size: Literal[16, 32, 64, 128] | None = None
    keep: bool = False


class Recipe(Strict):
    default: Quantisation | None = None
    overrides: list[QuantisationOverride] = []


class HubSource(Strict):
    """Without ``revision`` the checkpoint is not pinned: nothing of it runs until ``snakemake pin``
    has resolved ``branch`` and written the revision."""

    kind: Literal["hub"]
    repo: Annotated[str, StringConstraints(pattern=r"^[\w.-]+/[\w.-]+$")]
    revision: Revision | None = None
    branch: str = "main"


class LocalSource(Strict):
    kind: Literal["local"]
    path: str
    digest: Sha256


class SyntheticSource(Strict):
    """Weights made from a family's config and a seed; ``layout`` names the locked environment
    (``envs/<layout>.txt``) whose model code says which tensors there are."""

    kind: Literal["synthetic"]
    layout: str
    package: Package
    seed: Annotated[int, Field(ge=0)]
    dtype: Literal["float32", "bfloat16", "float16"]
    config: dict[str, Any]
    quantization: Recipe | None = None
    shard_bytes: Annotated[int, Field(ge=1 << 16)] = 1 << 30


class Checkpoint(Strict):
    role: Literal["subject", "control"] = "subject"
    source: Annotated[HubSource | LocalSource | SyntheticSource, Field(discriminator="kind")]


class PythonRuntime(Strict):
    """A release of mlx-lm or mlx-vlm, in an environment of its own from ``envs/<env>.txt``."""

    kind: Literal["python"]
    package: Package
    env: str


class AmbientRuntime(Strict):
    """The running interpreter; its packages must have the pinned versions."""

    kind: Literal["ambient"]
    package: Package
    pins: dict[str, str]

    @field_validator("pins")
    @classmethod
    def _names_mlx(cls, pins: dict[str, str]) -> dict[str, str]:
        if "mlx" not in pins:
            raise ValueError("must pin mlx, and the package itself, by exact version")
        return pins


Role = Literal["reference", "candidate", "null", "intervention"]


Patterns = str | list[str]


class Arm(Strict):
    """A runtime with its environment variables and patches: the thing that is measured.

    experts: the kernels that its routed experts are to run (fnmatch, on names without their
    templates' arguments), the same everywhere or by checkpoint; a trace that shows another voids
    the arm.
    """

    runtime: Name
    role: Role
    env: dict[Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]*$")], str] = {}
    patches: list[Annotated[str, StringConstraints(pattern=r"^[a-z_]+(=[0-9a-z.]+)?$")]] = []
    checkpoints: list[Name] | None = None
    experts: Patterns | dict[Name, Patterns] | None = None

    def experts_on(self, checkpoint: str) -> list[str] | None:
        """The declared kernels on a checkpoint, or None."""
        declared = self.experts
        if isinstance(declared, dict):
            declared = declared.get(checkpoint)
        return [declared] if isinstance(declared, str) else declared

    @field_validator("role", mode="before")
    @classmethod
    def _yaml_null(cls, role: Any) -> Any:
        # YAML reads an unquoted null as nothing; the null arm may be written either way.
        return "null" if role is None else role


class Shape(Strict):
    """Token ids in, tokens out, batch 1, greedy."""

    prompt: Annotated[int, Field(ge=16)] = 512
    generate: Annotated[int, Field(ge=4)] = 128


class Parity(Strict):
    """generate: greedy tokens to compare, where it is not the shape's number of them."""

    generate: Annotated[int, Field(ge=4)] | None = None


class Rounds(Strict):
    """slices: turns that the arms of a round take at decoding, a few tokens each; 1 is whole runs,
    one arm after the other. The first forward of each slice is not timed. pinned: all arms' main
    threads run on one CPU, the same (Linux; commands stay free)."""

    count: Annotated[int, Field(ge=3)] = 5
    warmup: Annotated[int, Field(ge=1)] = 1
    slices: Annotated[int, Field(ge=1)] = 1
    pinned: bool = False

    @model_serializer(mode="wrap")
    def _as_before(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # What a study without the key says: its results keep their keys.
        unsaid = {"slices": 1, "pinned": False}
        return {k: v for k, v in dump(self).items() if k not in unsaid or v != unsaid[k]}


class Guard(Strict):
    """The quiet host: foreign CPU use is in cores, times in seconds."""

    enabled: bool = True
    idle_s: Annotated[float, Field(gt=0)] = 0.5
    max_foreign_cpu: Annotated[float, Field(gt=0)] = 0.25
    max_wait_s: Annotated[float, Field(ge=0)] = 120
    sample_s: Annotated[float, Field(gt=0)] = 0.25
    max_busy_fraction: Annotated[float, Field(ge=0, le=1)] = 0.2
    attempts: Annotated[int, Field(ge=1)] = 5


class ParityLimits(Strict):
    """A mismatch is decided when the reference's own logit gap is at least ``decided_gap``; a
    loop of at most ``loop_period`` tokens repeated over ``loop_tokens`` voids an arm."""

    decided_gap: Annotated[float, Field(gt=0)] = 2.0
    loop_period: Annotated[int, Field(ge=1)] = 8
    loop_tokens: Annotated[int, Field(ge=4)] = 24


class Limits(Strict):
    """Shares; beyond them an attribution is refused, the timing stands."""

    conservation: Annotated[float, Field(gt=0, lt=1)] = 0.02
    unclassified: Annotated[float, Field(gt=0, lt=1)] = 0.01
    profiler_cost: Annotated[float, Field(gt=0, lt=1)] = 0.03
    memory: Annotated[int, Field(gt=0)] | None = None  # bytes that a run may need at most
    parity: ParityLimits = ParityLimits()


class Trace(Strict):
    """sweep: on CUDA, the kernel of the reference's expert gather for each top_k up to two above
    the model's own."""

    passes: Annotated[int, Field(ge=2)] = 3
    tokens: Annotated[int, Field(ge=4)] = 16
    sweep: bool = True


class Condition(Strict):
    quantity: str
    is_: Annotated[Literal[">", "<", ">=", "<="], Field(alias="is")]
    than: float


class Claim(Strict):
    """A hypothesis written before the numbers, and the rule that settles it."""

    name: Name
    says: str
    of: Literal["wall", "gpu"]
    all: Annotated[list[Condition], Field(min_length=1)]
    checkpoints: list[Name] | None = None
    arm: Name | None = None


class Crossover(Strict):
    """Where along a series of checkpoints, which differ in ``over`` alone, an arm stops being the
    faster one. arms: without it every candidate; checkpoints: without it every MoE subject."""

    over: Literal["expert_width", "experts", "top_k", "hidden"]
    arms: Annotated[list[Name], Field(min_length=1)] | None = None
    checkpoints: Annotated[list[Name], Field(min_length=2)] | None = None


class Answer(Strict):
    """A question put to the study, in its own words, and what in the record answers it: quantities
    (as claims name them, and "path": the experts' kernels), claims, or why nothing does."""

    asks: str
    by: list[str] = []
    claims: list[Name] = []
    not_measured: str | None = None
    checkpoints: list[Name] | None = None
    arm: Name | None = None

    @model_validator(mode="after")
    def _answered(self) -> "Answer":
        if not (self.by or self.claims or self.not_measured):
            raise ValueError("must be answered by quantities or claims, or be not_measured")
        return self


class Study(Strict):
    schema_: Annotated[Literal["moescope/study/1"], Field(alias="schema")]
    study: About
    machine: Machine | None = None
    checkpoints: Annotated[dict[Name, Checkpoint], Field(min_length=1)]
    runtimes: Annotated[
        dict[
            Name,
            Annotated[PythonRuntime | AmbientRuntime | CommandRuntime, Field(discriminator="kind")],
        ],
        Field(min_length=1),
    ]
    arms: Annotated[dict[Name, Arm], Field(min_length=1)]
    shape: Shape = Shape()
    rounds: Rounds = Rounds()
    guard: Guard = Guard()
    limits: Limits = Limits()
    trace: Trace = Trace()
    parity: Parity = Parity()
    claims: list[Claim] = []
    answers: list[Answer] = []
    crossover: Crossover | None = None

    def role(self, role: Role) -> list[str]:
        """Names of the arms with a role, in the study's order."""
        return [name for name, arm in self.arms.items() if arm.role == role]

    @property
    def reference(self) -> str:
        (name,) = self.role("reference")
        return name

    def arms_on(self, checkpoint: str) -> list[str]:
        """Names of the arms that are measured on a checkpoint, in the study's order."""
        return [
            name
            for name, arm in self.arms.items()
            if arm.checkpoints is None or checkpoint in arm.checkpoints
        ]

"""The processes of one arm that a trace needs, started and made ready at the same time.

Most of a trace's time is Python's imports, the loading of weights and first uses, each of which a
process waits for alone. Nothing is timed then, so all processes do it at once; what is timed
afterwards is asked of one process at a time.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ..measure import bench as benches
from ..runtimes.client import Worker, WorkerDied, WorkerError, close_all

if TYPE_CHECKING:
    from .stage import Context

PLAIN = "plain"
Chore = Callable[[Worker], Any]


class Team:
    """Processes by name, each with environment variables of its own beside the arm's.

    Entering starts them, leaving ends them. Where the weights do not fit so often, a team of
    "plain" alone remains, and the others are started one by one by whoever needs them.
    """

    def __init__(self, context: "Context", settings: Mapping[str, Mapping[str, str]]):
        self.context = context
        self.settings = {PLAIN: {}} | {name: dict(more) for name, more in settings.items()}
        self.workers: dict[str, Worker] = {}
        self.failed: dict[str, WorkerError] = {}  # processes beside "plain" that did not get ready

    def __enter__(self) -> Self:
        self._start(list(self.settings))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(*self.workers)

    def _start(self, names: list[str]) -> None:
        try:
            for name in names:
                self.workers[name] = worker = self.context.worker(**self.settings[name])
                worker.start()
            for name, worker in list(self.workers.items()):
                try:
                    worker.wait_ready()
                except WorkerDied as died:
                    if name == PLAIN:
                        raise
                    self.failed[name] = died
                    self.close(name)
                else:
                    self.context.guard.own(worker.pid)
        except BaseException:
            self.close(*self.workers)
            raise

    def load(self) -> dict[str, Any]:
        """Load the weights in all; what "plain" said. If they do not fit so often, in it alone."""
        arguments = self.context.bench.loading(self.context.arm)
        limit = benches.LOAD_LIMIT_S
        found = self.each(
            {name: lambda worker: worker.ask("load", limit, **arguments) for name in self.workers}
        )
        failed = [reply for reply in found.values() if isinstance(reply, WorkerError)]
        if failed and len(found) > 1 and any(one.kind == "out_of_memory" for one in failed):
            self.alone()
            return self.workers[PLAIN].ask("load", limit, **arguments)
        for reply in (found[PLAIN], *failed):
            if isinstance(reply, WorkerError):
                raise reply
        self.context.guard.settle()
        return found[PLAIN]

    def alone(self) -> None:
        """The weights fit once: end all and start "plain" anew; nothing is loaded then."""
        self.context.task.say("the weights do not fit several times: processes follow one another")
        self.close(*self.workers)
        self._start([PLAIN])

    def each(self, chores: Mapping[str, Chore]) -> dict[str, Any]:
        """A chore for each of some processes, at the same time: by name the result, or the
        WorkerError that ended it."""

        def run(name: str) -> Any:
            try:
                return chores[name](self.workers[name])
            except WorkerError as error:
                return error

        with ThreadPoolExecutor(max(len(chores), 1)) as pool:
            return dict(zip(chores, pool.map(run, chores), strict=True))

    def close(self, *names: str) -> None:
        """End some processes, at the same time."""
        close_all([self.workers.pop(name) for name in names])

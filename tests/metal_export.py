"""Exports of a Metal System Trace, written as xctrace documents and others saw them."""

from xml.sax.saxutils import escape

from moescope.trace import metal

PID = 2297
COLUMNS = {
    metal.INTERVALS: [
        "start", "duration", "channel-name", "frame-number", "start-latency", "event-depth",
        "event-label", "state", "connection-UUID", "color-index", "process", "gpu",
        "cmdbuffer-id",
    ],
    metal.SUBMISSIONS: [
        "start", "duration", "event-type", "gpu", "process", "num-encoders", "encoder-time",
        "cmdbuffer-id",
    ],
}  # fmt: skip
TAGS = {
    "start": "start-time", "duration": "duration", "channel-name": "gpu-channel-name",
    "frame-number": "gpu-frame-number", "start-latency": "duration",
    "event-depth": "metal-nesting-level", "event-label": "formatted-label", "state": "gpu-state",
    "process": "process", "gpu": "metal-device-name", "cmdbuffer-id": "metal-command-buffer-id",
    "event-type": "metal-event-name", "num-encoders": "uint32", "encoder-time": "duration",
    "connection-UUID": "connection-uuid64", "color-index": "render-buffer-depth",
}  # fmt: skip


class Document:
    """Writes a table as xctrace does: a value gets an id, later ones refer to it; a row's label
    holds its process; an empty cell is a sentinel."""

    def __init__(self, table):
        self.table, self.columns = table, COLUMNS[table]
        self.ids: dict[tuple, int] = {}
        self.rows: list[str] = []

    def cell(self, tag, value, inside=""):
        if value is None:
            return "<sentinel/>"
        key = (tag, value)
        if key in self.ids:
            return f'<{tag} ref="{self.ids[key]}"/>'
        self.ids[key] = len(self.ids) + 1
        text = inside or escape(str(value))
        return f'<{tag} id="{self.ids[key]}" fmt="{escape(str(value))}">{text}</{tag}>'

    def process(self, pid):
        if pid is None:
            return "<sentinel/>"
        known = ("process", f"tool ({pid})") in self.ids
        inside = "" if known else self.cell("pid", pid)
        return self.cell("process", f"tool ({pid})", inside)

    def row(self, **values):
        cells = []
        for column in self.columns:
            value = values.get(column.replace("-", "_"))
            if column == "process":
                cells.append(self.process(value))
            elif column == "event-label" and value is not None:
                known = ("formatted-label", value) in self.ids
                inside = "" if known else self.cell("string", value) + self.process(
                    values.get("process")
                )  # fmt: skip
                cells.append(self.cell("formatted-label", value, inside))
            else:
                cells.append(self.cell(TAGS[column], value))
        self.rows.append(f"<row>{''.join(cells)}</row>")

    def write(self, path, second_node=False):
        columns = "".join(f"<col><mnemonic>{c}</mnemonic></col>" for c in self.columns)
        half = len(self.rows) // 2 if second_node else len(self.rows)
        body = "".join(self.rows[:half])
        rest = "".join(self.rows[half:])
        extra = f"<node xpath='//table[2]'>{rest}</node>" if second_node else ""
        path.write_text(
            '<?xml version="1.0"?>\n<trace-query-result>\n'
            "<node xpath='//trace-toc[1]/run[1]/data[1]/table[109]'>"
            f'<schema name="{self.table}">{columns}</schema>{body}</node>{extra}'
            "</trace-query-result>"
        )
        return path


def contents(path, pid=PID, how="launched"):
    path.write_text(
        '<?xml version="1.0"?><trace-toc><run number="1"><info><target><process '
        f'type="{how}" return-exit-status="0" name="bench" pid="{pid}"/></target></info>'
        f'<processes><process name="kernel" pid="0"/><process name="bench" pid="{pid}"/>'
        '</processes><data><table schema="metal-gpu-intervals"/></data></run></trace-toc>'
    )
    return path


BUFFERS, ENCODERS = 4, 2  # a token
RUN, GAP = 900_000, 100_000  # ns of GPU work and of idleness a command buffer


def trace(folder, tokens, second_node=False, process_column=True, how="launched"):
    """A load on the GPU, a prefill, ``tokens`` equal steps; another process draws."""
    folder.mkdir()
    gpu, host = Document(metal.INTERVALS), Document(metal.SUBMISSIONS)
    clock, buffer = 50_000_000, 1000

    def work(ns, encoders=ENCODERS):
        nonlocal clock, buffer
        buffer += 1
        host.row(
            start=clock - 200_000,
            duration=5_000,
            event_type=metal.SUBMISSION,
            gpu="M3",
            process=PID,
            num_encoders=encoders,
            encoder_time=30_000,
            cmdbuffer_id=buffer,
        )
        host.row(
            start=clock,
            duration=1,
            event_type="CommandBufferEncoding",
            gpu="M3",
            process=PID,
            num_encoders=0,
            encoder_time=0,
            cmdbuffer_id=buffer,
        )
        part = ns // encoders
        for index in range(encoders):
            gpu.row(
                start=clock + index * part,
                duration=part,
                channel_name="Compute",
                frame_number=0,
                start_latency=70_000,
                event_depth=0,
                event_label=f"Command Buffer 0:Compute Command {index}",
                state="Active",
                process=PID if process_column else None,
                gpu="M3",
                cmdbuffer_id=buffer,
            )
        # A nested row lies inside its parent and must not count twice.
        gpu.row(
            start=clock,
            duration=part // 2,
            channel_name="Compute",
            event_depth=1,
            event_label="GPU Execution",
            state="Active",
            gpu="M3",
            cmdbuffer_id=buffer,
            process=PID if process_column else None,
        )
        gpu.row(
            start=clock,
            duration=ns,
            channel_name="Fragment",
            event_depth=0,
            event_label="Window",
            state="Active",
            process=77,
            gpu="M3",
            cmdbuffer_id=5,
        )
        gpu.row(
            start=clock,
            duration=ns,
            channel_name="Compute",
            event_depth=0,
            event_label="waiting",
            state="Idle",
            process=PID,
            gpu="M3",
            cmdbuffer_id=buffer,
        )
        clock += ns + GAP

    work(20_000_000, 1)
    for _ in range(BUFFERS * 3):
        work(2_000_000)
    for _ in range(tokens * BUFFERS):
        work(RUN)
    return metal.read(
        contents(folder / "toc.xml", how=how),
        gpu.write(folder / "gpu.xml", second_node),
        host.write(folder / "host.xml", second_node),
    )  # fmt: skip

# Questions about the results; they print and make nothing that a result depends on. The last two
# write into the sources, where a person then commits it.


# Why each stale job is stale, and what the run will cost.
rule explain:
    log:
        "logs/explain.log",
    shell:
        tool_command("explain")


# Render every committed record again and compare.
rule audit:
    log:
        "logs/audit.log",
    shell:
        tool_command("audit")


# Analyse and render every committed measurement with the present code.
rule rerender:
    log:
        "logs/rerender.log",
    shell:
        tool_command("rerender")


# Is this host ready for the study?
rule doctor:
    log:
        "logs/doctor.log",
    shell:
        tool_command("doctor")


# The study's records over time.
rule history:
    log:
        "logs/history.log",
    shell:
        tool_command("history")


# Resolve the study's branches to revisions and write them into it.
rule pin:
    log:
        "logs/pin.log",
    shell:
        tool_command("pin", f"--study {study_file()}")


# Enter the crossover of the study's record into the table of the fused kernels.
rule crossover:
    log:
        "logs/crossover.log",
    shell:
        tool_command("crossover")

# Where an arm's token goes, by term.
rule trace:
    input:
        upstream("trace"),
    output:
        result("trace"),
    log:
        "logs/trace/{subject}.{key}.log",
    resources:
        gpu=GPU,
    shell:
        stage_command("trace")

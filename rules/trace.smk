# Where an arm's token goes, by term.
rule trace:
    input:
        upstream("trace"),
    output:
        result("trace"),
    log:
        "logs/trace/{subject}.{key}.log",
    resources:
        gpu=1,
    shell:
        stage_command("trace")

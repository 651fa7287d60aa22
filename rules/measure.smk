# Arms side by side, in interleaved rounds on a quiet host.
rule measure:
    input:
        upstream("measure"),
    output:
        result("measure"),
    log:
        "logs/measure/{subject}.{key}.log",
    priority: 10
    resources:
        gpu=GPU,
    shell:
        stage_command("measure")

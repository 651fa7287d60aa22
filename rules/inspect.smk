# What a checkpoint is: architecture, quantisation, bytes per token.
rule inspect:
    input:
        upstream("inspect"),
    output:
        result("inspect"),
    log:
        "logs/inspect/{subject}.{key}.log",
    shell:
        stage_command("inspect")

# First use, in a process of its own: compilation, caches. Discarded for timing.
rule warmup:
    input:
        upstream("warmup"),
    output:
        result("warmup"),
    log:
        "logs/warmup/{subject}.{key}.log",
    priority: 20  # before anything else uses an arm for the first time
    resources:
        gpu=1,
    shell:
        stage_command("warmup")

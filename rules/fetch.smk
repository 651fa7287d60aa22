# Weights, pinned: from the Hub, a folder, or made from a seed.
rule fetch:
    input:
        upstream("fetch"),
    output:
        result("fetch"),
    log:
        "logs/fetch/{subject}.{key}.log",
    shell:
        stage_command("fetch")

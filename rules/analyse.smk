# Ratios, terms, claims: from committed data alone.
rule analyse:
    input:
        upstream("analyse"),
    output:
        result("analyse"),
    log:
        "logs/analyse/{subject}.{key}.log",
    shell:
        stage_command("analyse")

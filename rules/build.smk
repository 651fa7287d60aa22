# A runtime's pin made ready; what it consists of.
rule build:
    input:
        upstream("build"),
    output:
        result("build"),
    log:
        "logs/build/{subject}.{key}.log",
    shell:
        stage_command("build")

# Are the tokens right? Each arm against the reference.
rule parity:
    input:
        upstream("parity"),
    output:
        result("parity"),
    log:
        "logs/parity/{subject}.{key}.log",
    resources:
        gpu=1,
    shell:
        stage_command("parity")

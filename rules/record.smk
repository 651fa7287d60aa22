# The document: Markdown, HTML and JSON.
rule render:
    input:
        upstream("record"),
    output:
        result("record"),
    log:
        "logs/record/{subject}.{key}.log",
    shell:
        stage_command("record")

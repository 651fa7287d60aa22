# moescope: where the decode time of mixture-of-experts models goes on MLX.
#
# Results stand in results/<stage>/<subject>/<key>/; the key says what they depend on.
# snakemake --cores 1 record     make the study's record, running only what is missing
# snakemake -n record            list the missing jobs; `snakemake explain` says why and at what cost
from snakemake.utils import min_version

min_version("9.20")

if not workflow.overwrite_configfiles:

    configfile: "config.yaml"


include: "rules/common.smk"


PLAN = read_plan()

# Jobs that take times have the GPU alone; the others may share it.
GPU = gpu_jobs()
workflow.register_resource("gpu", GPU)


wildcard_constraints:
    key=r"[0-9a-f]{12}",
    subject=r"[a-z0-9][a-z0-9.@-]*",


onstart:
    only_run()


localrules:
    record,
    explain,
    audit,
    rerender,
    doctor,
    history,
    pin,
    crossover,


rule record:
    default_target: True
    input:
        ancient(PLAN.record.outputs),


include: "rules/fetch.smk"
include: "rules/inspect.smk"
include: "rules/build.smk"
include: "rules/warmup.smk"
include: "rules/measure.smk"
include: "rules/trace.smk"
include: "rules/parity.smk"
include: "rules/analyse.smk"
include: "rules/record.smk"
include: "rules/tools.smk"

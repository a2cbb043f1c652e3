//! What becomes of each of llama-server's flags that is not one of this server's own. A test holds it to llama-server's
//! reference, which is beside it.

use super::Habit::{Done, Is, Moot, Refused};
use super::Takes::{Nothing, Perhaps, Two, Value};
use super::{Flag, Habit, Takes};

const READ: &str = "weights are read into memory, and neither mapped nor locked there";
const FLASH: &str = "how attention is computed follows from --kv-layout, --ctx-size, --parallel and --cache-type-k";
const BATCH: &str = "steps are as long as --step-ms-target says, and prompts are read in what fits";
const THREADS: &str = "prompts and answers are computed by the threads of --threads";
const PLACING: &str =
    "the system says where threads run and how they wait, and --workers puts a process on each socket";
const PINNING: &str = "start it under `taskset` to keep it to some processors";
const PREFIXES: &str = "prompts are found again by their beginnings, as far as the KV cache and --cache-ram go";
const SPEED: &str = "guesses change how fast an answer comes, never which; --prompt-lookup and --model-draft make them";
const LOG: &str = "RUST_LOG says what is logged, such as RUST_LOG=debug";
const LOG_FORM: &str = "the log is JSON, and at a terminal lines for people";
const MEDIA: &str = "images and sound are not supported";
const SHIFT: &str = "tokens are never dropped from a context: an answer ends where it is full";
const PLACEMENT: &str = "where weights and cells are kept follows from --n-gpu-layers";
const CHECKPOINTS: &str = "what of a context is kept to go on from is settled for each model";
const FIT: &str = "context and layers that are not named are chosen to fit the memory";
const NO_CORS: &str =
    "--cors-origins names the pages that may ask, by GET, POST and DELETE and with any header; no cookie is read";
const TIMEOUT: &str = "--queue-timeout bounds a request's wait, and --drain-timeout the end";
const ALL_OF_MESSAGES: &str = "the template gets all that messages have";
const TOLD_APART: &str = "what a model thinks and calls is told apart from what it says";

const THINKING: &str = "requests say `reasoning_effort`, each for itself";
const THOUGHTS: &str = "requests say `thinking_budget`, each for itself";
const SAMPLING: &str = "requests say how tokens are chosen, each for itself";
const LENGTH: &str = "requests say `max_tokens`, each for itself";
const FORM: &str = "requests say `response_format`, each for itself";
const NAMED: &str =
    "--model takes the file's address: hf://owner/repository/path/model.gguf, or of the draft --model-draft";
const NO_LIST: &str = "models are kept where --cache-dir says, each under its SHA-256";
const HF_TOKEN: &str = "HF_TOKEN in the environment says it";
const IN_REGISTRY: &str = "--model takes its address: oci://docker.io/ai/model:tag";
const NO_TLS: &str = "TLS belongs to the proxy or ingress in front of it";
const NO_DRAFT: &str = "--model-draft and --spec-draft-n-max are all there is of it";
const NO_TEMPLATE: &str = "chats are rendered by the template of the model's file, or by that of --chat-template";
const KWARGS: &str = "requests say `chat_template_kwargs`, each for itself";
const NO_ADAPTERS: &str = "adapters are not supported: merge it into the model's file";
const NO_TOOLS: &str = "tools are for clients to run: requests bring `tools`, and answers say which are called";
const NO_PAGES: &str = "there are no pages for browsers: point one of the many at /v1";
const ONE_MODEL: &str = "one process serves one model: start one for each";
const IN_FILE: &str = "the model's file says it";
const ITS_CONTEXT: &str =
    "--ctx-size is the context of all --parallel together, and --ctx-size 0 what the model was trained for";
const SYSTEM_PROMPT: &str = "requests say it, each for itself: a message with the role system";
const NO_PLACES: &str = "--n-gpu-layers and --gpu-memory say what is on GPUs";

const fn flag(names: &'static [&'static str], takes: Takes, habit: Habit) -> Flag {
    Flag { names, takes, habit }
}

pub(super) const FLAGS: &[Flag] = &[
    // Another way to write what is here.
    flag(&["-np"], Value, Is(&["--parallel"])),
    flag(&["-ngl"], Value, Is(&["--n-gpu-layers"])),
    flag(&["-dev"], Value, Is(&["--device"])),
    flag(&["-sm"], Value, Is(&["--split-mode"])),
    flag(&["-ts"], Value, Is(&["--tensor-split"])),
    flag(&["-mg"], Value, Is(&["--main-gpu"])),
    flag(&["-ctk"], Value, Is(&["--cache-type-k"])),
    flag(&["-ctv"], Value, Is(&["--cache-type-v"])),
    flag(&["-ub"], Value, Is(&["--ubatch-size"])),
    flag(&["-cram"], Value, Is(&["--cache-ram"])),
    flag(&["-md"], Value, Is(&["--model-draft"])),
    flag(&["-mu", "--model-url"], Value, Is(&["--model"])),
    flag(&["--draft", "--draft-n"], Value, Is(&["--spec-draft-n-max"])),
    flag(&["-kvu", "--kv-unified"], Nothing, Is(&["--kv-layout", "unified"])),
    flag(&["-no-kvu", "--no-kv-unified"], Nothing, Is(&["--kv-layout", "split"])),
    // Always so.
    flag(&["--jinja", "--metrics", "--slots", "--warmup", "--cache-prompt"], Nothing, Done),
    flag(&["-cb", "--cont-batching", "--no-context-shift", "--no-mmap"], Nothing, Done),
    flag(&["--no-webui", "--no-ui", "-no-ag", "--no-agent", "--no-perf"], Nothing, Done),
    flag(&["--no-webui-mcp-proxy", "--no-ui-mcp-proxy", "--no-models-autoload"], Nothing, Done),
    flag(&["--no-mmproj", "--no-mmproj-auto", "--mmproj-auto", "--no-cors-credentials"], Nothing, Done),
    flag(&["-kvo", "--kv-offload", "--repack", "--op-offload"], Nothing, Done),
    flag(&["-e", "--escape", "--no-escape", "--no-prefill-assistant", "--no-skip-chat-parsing"], Nothing, Done),
    // No answer is another for them.
    flag(&["--mmap", "--mlock", "-dio", "--direct-io", "-ndio", "--no-direct-io"], Nothing, Moot(READ)),
    flag(&["-lm", "--load-mode", "-lzm", "--lazy-mode"], Value, Moot(READ)),
    flag(&["-fa", "--flash-attn"], Perhaps, Moot(FLASH)),
    flag(&["-b", "--batch-size"], Value, Moot(BATCH)),
    flag(&["-nocb", "--no-cont-batching"], Nothing, Moot(BATCH)),
    flag(&["-tb", "--threads-batch", "-td", "--threads-draft", "--spec-draft-threads"], Value, Moot(THREADS)),
    flag(&["-tbd", "--threads-batch-draft", "--spec-draft-threads-batch"], Value, Moot(THREADS)),
    flag(&["--threads-http"], Value, Moot("connections need no threads of their own")),
    flag(&["--prio", "--prio-batch", "--poll", "--poll-batch", "--numa"], Value, Moot(PLACING)),
    flag(&["--spec-draft-prio", "--prio-draft", "--spec-draft-prio-batch", "--prio-batch-draft"], Value, Moot(PLACING)),
    flag(&["--spec-draft-poll", "--poll-draft", "--spec-draft-poll-batch", "--poll-batch-draft"], Value, Moot(PLACING)),
    flag(&["--keep"], Value, Moot(SHIFT)),
    flag(&["--cache-reuse", "-sps", "--slot-prompt-similarity"], Value, Moot(PREFIXES)),
    flag(&["--cache-idle-slots", "--no-cache-idle-slots"], Nothing, Moot(PREFIXES)),
    flag(&["--swa-full"], Nothing, Moot(CHECKPOINTS)),
    flag(&["-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"], Value, Moot(CHECKPOINTS)),
    flag(&["-cms", "--checkpoint-min-step", "-dt", "--defrag-thold"], Value, Moot(CHECKPOINTS)),
    flag(&["-fit", "--fit"], Perhaps, Moot(FIT)),
    flag(&["-fitt", "--fit-target", "-fitc", "--fit-ctx"], Value, Moot(FIT)),
    flag(&["-nr", "--no-repack", "--no-host", "--no-op-offload"], Nothing, Moot(PLACEMENT)),
    flag(
        &["--check-tensors"],
        Nothing,
        Moot("a sample of the weights is looked at, and the first token must be finite"),
    ),
    flag(&["--perf"], Nothing, Moot("answers tell where their time went when requests say `timings`")),
    flag(&["-bs", "--backend-sampling"], Nothing, Moot("tokens are chosen on the CPU")),
    flag(&["--no-slots"], Nothing, Moot("GET /slots says how many sequences are in use, and nothing of any request")),
    flag(&["--tags"], Value, Moot("/v1/models tells names alone")),
    flag(&["-to", "--timeout"], Value, Moot(TIMEOUT)),
    flag(&["--sse-ping-interval"], Value, Moot("a silent stream has a comment every 10 seconds")),
    flag(&["-v", "--verbose", "--log-verbose"], Nothing, Moot(LOG)),
    flag(&["-lv", "--verbosity", "--log-verbosity"], Value, Moot(LOG)),
    flag(&["--log-disable"], Nothing, Moot("RUST_LOG=off turns the log off")),
    flag(&["--log-jsonl", "--no-log-jsonl", "--log-prefix", "--no-log-prefix"], Nothing, Moot(LOG_FORM)),
    flag(&["--log-timestamps", "--no-log-timestamps"], Nothing, Moot(LOG_FORM)),
    flag(&["--log-colors"], Perhaps, Moot("NO_COLOR turns colours off")),
    flag(&["--reasoning-preserve"], Nothing, Moot(ALL_OF_MESSAGES)),
    flag(&["--no-warmup"], Nothing, Moot("a model computes once before it is served, which shows that it can")),
    flag(&["--no-cache-prompt"], Nothing, Moot(PREFIXES)),
    flag(&["--spec-draft-n-min", "--draft-min", "--draft-n-min", "--spec-draft-p-split"], Value, Moot(SPEED)),
    flag(&["--draft-p-split", "--spec-draft-p-min", "--draft-p-min", "--spec-type"], Value, Moot(SPEED)),
    flag(
        &["--spec-draft-backend-sampling", "--no-spec-draft-backend-sampling", "--spec-default"],
        Nothing,
        Moot(SPEED),
    ),
    flag(&["--spec-draft-sampling", "--spec-synth-len", "--spec-synth-rates"], Value, Moot(SPEED)),
    flag(&["-lcs", "--lookup-cache-static", "-lcd", "--lookup-cache-dynamic"], Value, Moot(SPEED)),
    flag(&["--spec-ngram-mod-n-min", "--spec-ngram-mod-n-max", "--spec-ngram-mod-n-match"], Value, Moot(SPEED)),
    flag(
        &["--spec-ngram-simple-size-n", "--spec-ngram-simple-size-m", "--spec-ngram-simple-min-hits"],
        Value,
        Moot(SPEED),
    ),
    flag(
        &["--spec-ngram-map-k-size-n", "--spec-ngram-map-k-size-m", "--spec-ngram-map-k-min-hits"],
        Value,
        Moot(SPEED),
    ),
    flag(&["--spec-ngram-map-k4v-size-n", "--spec-ngram-map-k4v-size-m"], Value, Moot(SPEED)),
    flag(&["--spec-ngram-map-k4v-min-hits", "--spec-ngram-size-n"], Value, Moot(SPEED)),
    flag(&["--spec-ngram-size-m", "--spec-ngram-min-hits"], Value, Moot(SPEED)),
    // Not here, and answers would be others, or what was asked for would be missed.
    flag(&["--list-devices"], Nothing, Refused(&[], "`gantry-server devices` lists them")),
    flag(&["--version"], Nothing, Refused(&[], "`gantry-server --version` says it")),
    flag(&["--usage"], Nothing, Refused(&[], "`gantry-server serve --help` lists the flags")),
    flag(&["--completion-bash"], Nothing, Refused(&[], "there are no completions for shells")),
    flag(&["-cl", "--cache-list"], Nothing, Refused(&[], NO_LIST)),
    flag(&["-hf", "-hfr", "--hf-repo", "-hff", "--hf-file"], Value, Refused(&[], NAMED)),
    flag(&["-hft", "--hf-token"], Value, Refused(&[], HF_TOKEN)),
    flag(&["-dr", "--docker-repo"], Value, Refused(&[], IN_REGISTRY)),
    flag(&["-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf"], Value, Refused(&[], NAMED)),
    flag(&["--embd-gemma-default", "--gpt-oss-20b-default", "--gpt-oss-120b-default"], Nothing, Refused(&[], NAMED)),
    flag(&["--vision-gemma-4b-default", "--vision-gemma-12b-default"], Nothing, Refused(&[], NAMED)),
    flag(&["--fim-qwen-1.5b-default", "--fim-qwen-3b-default", "--fim-qwen-7b-default"], Nothing, Refused(&[], NAMED)),
    flag(&["--fim-qwen-7b-spec", "--fim-qwen-14b-spec", "--fim-qwen-30b-default"], Nothing, Refused(&[], NAMED)),
    flag(&["--temp", "--temperature"], Value, Refused(&["1"], SAMPLING)),
    flag(&["--top-k", "--min-p", "--xtc-probability", "--dry-multiplier"], Value, Refused(&["0"], SAMPLING)),
    flag(&["--presence-penalty", "--frequency-penalty", "--dynatemp-range"], Value, Refused(&["0"], SAMPLING)),
    flag(&["--mirostat"], Value, Refused(&["0"], SAMPLING)),
    flag(&["--top-p", "--typical", "--typical-p", "--repeat-penalty"], Value, Refused(&["1"], SAMPLING)),
    flag(&["--top-nsigma", "--top-n-sigma", "--adaptive-target", "-s", "--seed"], Value, Refused(&["-1"], SAMPLING)),
    flag(&["--repeat-last-n"], Value, Refused(&["64"], SAMPLING)),
    flag(
        &["--xtc-threshold", "--dry-base", "--dry-allowed-length", "--dry-penalty-last-n"],
        Value,
        Refused(&[], SAMPLING),
    ),
    flag(&["--dry-sequence-breaker", "--samplers", "--sampler-seq", "--sampling-seq"], Value, Refused(&[], SAMPLING)),
    flag(&["--adaptive-decay", "--dynatemp-exp", "--mirostat-lr", "--mirostat-ent"], Value, Refused(&[], SAMPLING)),
    flag(&["-l", "--logit-bias", "-r", "--reverse-prompt"], Value, Refused(&[], SAMPLING)),
    flag(&["--ignore-eos"], Nothing, Refused(&[], SAMPLING)),
    flag(&["-n", "--predict", "--n-predict"], Value, Refused(&["-1"], LENGTH)),
    flag(&["--grammar", "--grammar-file"], Value, Refused(&[""], "requests say `grammar`, each for itself")),
    flag(&["-j", "--json-schema", "-jf", "--json-schema-file"], Value, Refused(&[""], FORM)),
    flag(&["--embd-normalize"], Value, Refused(&["2"], "vectors have the Euclidean norm 1")),
    flag(&["-sp", "--special"], Nothing, Refused(&[], "special tokens are never part of an answer's text")),
    flag(&["--context-shift"], Nothing, Refused(&[], SHIFT)),
    flag(&["--no-reasoning-preserve"], Nothing, Refused(&[], ALL_OF_MESSAGES)),
    flag(&["--slot-save-path"], Value, Refused(&[], "--cache-disk-dir keeps prompts over restarts")),
    flag(
        &["--kv-unified-per-slot"],
        Value,
        Refused(&[], "--ctx-size with --kv-layout unified is what a request may use"),
    ),
    flag(
        &["--props"],
        Nothing,
        Refused(&[], "settings do not change while it runs; GET /props tells them without a flag"),
    ),
    flag(&["--ssl-key-file", "--ssl-cert-file"], Value, Refused(&[""], NO_TLS)),
    flag(&["--cors-methods", "--cors-headers"], Value, Refused(&[""], NO_CORS)),
    flag(&["--cors-credentials"], Nothing, Refused(&[], NO_CORS)),
    flag(&["--api-prefix"], Value, Refused(&[""], "a proxy or ingress in front of it can add one")),
    flag(&["--reuse-port"], Nothing, Refused(&[], "one process has a port; --workers has several work behind it")),
    flag(&["--chat-template-kwargs"], Value, Refused(&["", "{}"], KWARGS)),
    flag(&["--no-jinja"], Nothing, Refused(&[], NO_TEMPLATE)),
    flag(
        &["--prefill-assistant"],
        Nothing,
        Refused(
            &[],
            "an assistant's message that comes last is a whole turn, unless the request says continue_final_message: true",
        ),
    ),
    flag(&["--skip-chat-parsing"], Nothing, Refused(&[], TOLD_APART)),
    flag(&["--reasoning-format"], Value, Refused(&["auto", "deepseek"], TOLD_APART)),
    flag(&["-rea", "--reasoning"], Value, Refused(&["auto"], THINKING)),
    flag(&["--reasoning-effort"], Value, Refused(&[""], THINKING)),
    flag(&["--reasoning-budget"], Value, Refused(&["-1"], THOUGHTS)),
    flag(&["--reasoning-budget-message"], Value, Refused(&[""], THOUGHTS)),
    flag(&["--lora", "--lora-scaled", "--control-vector", "--control-vector-scaled"], Value, Refused(&[], NO_ADAPTERS)),
    flag(&["--control-vector-layer-range"], Two, Refused(&[], NO_ADAPTERS)),
    flag(&["--lora-init-without-apply"], Nothing, Refused(&[], NO_ADAPTERS)),
    flag(&["-mm", "--mmproj", "-mmu", "--mmproj-url", "-mmdev", "--mmproj-device"], Value, Refused(&[], MEDIA)),
    flag(&["--mmproj-offload", "--no-mmproj-offload"], Nothing, Moot(MEDIA)),
    flag(&["--image-min-tokens", "--image-max-tokens", "--mtmd-batch-max-tokens"], Value, Moot(MEDIA)),
    flag(&["--video-fps", "--video-timestamp-interval", "--video-ffmpeg-dir"], Value, Moot(MEDIA)),
    flag(&["--media-path"], Value, Refused(&[], MEDIA)),
    flag(&["--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale"], Value, Refused(&[], IN_FILE)),
    flag(&["--yarn-orig-ctx", "--yarn-ext-factor", "--yarn-attn-factor"], Value, Refused(&[], IN_FILE)),
    flag(&["--yarn-beta-slow", "--yarn-beta-fast", "--override-kv"], Value, Refused(&[], IN_FILE)),
    flag(&["-C", "--cpu-mask", "-Cr", "--cpu-range", "--cpu-strict"], Value, Refused(&[], PINNING)),
    flag(&["-Cb", "--cpu-mask-batch", "-Crb", "--cpu-range-batch", "--cpu-strict-batch"], Value, Refused(&[], PINNING)),
    flag(
        &["-Cd", "--cpu-mask-draft", "--spec-draft-cpu-mask", "-Crd", "--cpu-range-draft"],
        Value,
        Refused(&[], PINNING),
    ),
    flag(&["--spec-draft-cpu-range", "--spec-draft-cpu-strict", "--cpu-strict-draft"], Value, Refused(&[], PINNING)),
    flag(&["-Cbd", "--cpu-mask-batch-draft", "--spec-draft-cpu-mask-batch"], Value, Refused(&[], PINNING)),
    flag(&["--spec-draft-cpu-strict-batch", "--cpu-strict-batch-draft"], Value, Refused(&[], PINNING)),
    flag(&["-nkvo", "--no-kv-offload"], Nothing, Refused(&[], NO_PLACES)),
    flag(
        &["-ot", "--override-tensor", "-ncmoe", "--n-cpu-moe", "-ncffn", "--n-cpu-ffn"],
        Value,
        Refused(&[], NO_PLACES),
    ),
    flag(
        &["-cmoe", "--cpu-moe", "-cmoed", "--cpu-moe-draft", "--spec-draft-cpu-moe"],
        Nothing,
        Refused(&[], NO_PLACES),
    ),
    flag(&["-ncmoed", "--n-cpu-moe-draft", "--spec-draft-n-cpu-moe"], Value, Refused(&[], NO_PLACES)),
    flag(&["--spec-draft-ncmoe", "-otd", "--override-tensor-draft"], Value, Refused(&[], NO_PLACES)),
    flag(&["--spec-draft-override-tensor"], Value, Refused(&[], NO_PLACES)),
    flag(&["-ctkd", "--cache-type-k-draft", "--spec-draft-type-k"], Value, Refused(&[], NO_DRAFT)),
    flag(&["-ctvd", "--cache-type-v-draft", "--spec-draft-type-v"], Value, Refused(&[], NO_DRAFT)),
    flag(
        &["-devd", "--device-draft", "--spec-draft-device", "-ngld", "--gpu-layers-draft"],
        Value,
        Refused(&[], NO_DRAFT),
    ),
    flag(&["--n-gpu-layers-draft", "--spec-draft-ngl"], Value, Refused(&[], NO_DRAFT)),
    flag(&["--rpc"], Value, Refused(&[], "other machines do not take part in a model's work")),
    flag(&["--models-dir", "--models-preset", "--models-max"], Value, Refused(&[], ONE_MODEL)),
    flag(&["--models-autoload"], Nothing, Refused(&[], ONE_MODEL)),
    flag(&["--sleep-idle-seconds"], Value, Refused(&["-1"], "a model stays loaded as long as it is served")),
    flag(&["--path", "--ui-config", "--webui-config", "--ui-config-file"], Value, Refused(&[], NO_PAGES)),
    flag(&["--webui-config-file"], Value, Refused(&[], NO_PAGES)),
    flag(&["--ui", "--webui", "--ui-mcp-proxy", "--webui-mcp-proxy"], Nothing, Refused(&[], NO_PAGES)),
    flag(&["--tools", "--tools-runtime", "--mcp-servers-config", "--mcp-servers-json"], Value, Refused(&[], NO_TOOLS)),
    flag(&["-ag", "--agent"], Nothing, Refused(&[], NO_TOOLS)),
    flag(&["--log-file"], Value, Refused(&[], "the log is on standard error: send it to a file with 2>FILE")),
    flag(&["--log-prompts-dir"], Value, Refused(&[], "no prompt and no answer is ever logged")),
    // Of vLLM and Ollama, whose names are like those of other flags here.
    flag(&["--served-model-name"], Value, Refused(&[], "--alias names the model")),
    flag(&["--max-model-len", "--num-ctx", "--num_ctx"], Value, Refused(&[], ITS_CONTEXT)),
    flag(&["--gpu-memory-utilization"], Value, Refused(&[], "--gpu-memory says it, in MiB")),
    flag(
        &["--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"],
        Value,
        Refused(&[], "all GPUs are used; --device, --split-mode and --tensor-split say which, and how"),
    ),
    flag(&["--data-parallel-size", "-dp"], Value, Refused(&[], "--workers is how many serve side by side")),
    flag(&["--max-num-seqs"], Value, Refused(&[], "--parallel is how many generate at once")),
    flag(&["--max-num-batched-tokens"], Value, Refused(&[], BATCH)),
    flag(&["--kv-cache-dtype"], Value, Refused(&["auto"], "--cache-type-k says it: f16, q8_0 or q4_0")),
    flag(&["--enable-prefix-caching"], Nothing, Done),
    flag(&["--no-enable-prefix-caching"], Nothing, Moot(PREFIXES)),
    flag(&["--keep-alive", "--keepalive"], Value, Refused(&["-1"], "a model stays loaded as long as it is served")),
    flag(&["--system-prompt", "--system"], Value, Refused(&[], SYSTEM_PROMPT)),
];

/// What other servers call their commands, and what there is here for them.
const COMMANDS: &[(&[&str], &str)] = &[
    (
        &["run", "start", "chat"],
        "`gantry-server FILE` serves a model's file to clients; there are no chats at the terminal",
    ),
    (&["list", "ls", "ps", "show"], "there is no store of models: `gantry-server validate FILE` looks at a file"),
    (&["pull", "push", "create", "download"], NAMED),
];

/// What to do instead of another server's command.
pub(in crate::config) fn instead_of(command: &str) -> Option<&'static str> {
    COMMANDS.iter().find(|(names, _)| names.contains(&command)).map(|(_, instead)| *instead)
}

//! What flags mean, and what is said of wrong ones.
#![allow(clippy::unwrap_used)]

use clap::Parser;
use gantry_engine::{ALL_LAYERS, CacheType, KvLayout};
use kube::CustomResourceExt;

use super::check::MAX_GPU_LAYERS;
use super::*;
use crate::version::DispatchStrategy;

/// A file that is there.
const DRAFT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/main.rs");

fn serve(args: &[&str]) -> Result<ServeSettings, Problems> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let all = ["gantry-server", "serve", "--model", file].into_iter().chain(args.iter().copied());
    match Cli::try_parse_from(all).unwrap().command {
        Command::Serve(args) => args.settings(),
        other => panic!("{other:?}"),
    }
}

/// The largest value that the API server takes for a field of the spec, as its rules say.
fn api_maximum(path: &str) -> u64 {
    let crd = serde_json::to_value(gantry_crds::InferenceService::crd()).unwrap();
    let (parents, field) = path.rsplit_once('.').unwrap();
    let mut parent = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    for name in parents.split('.') {
        parent = &parent["properties"][name];
    }
    let maximum = |schema: &serde_json::Value, name: &str| {
        let rules = schema["x-kubernetes-validations"].as_array().cloned().unwrap_or_default();
        let bound = format!("{name} <= ");
        let after = |rule: &serde_json::Value| {
            let digits: String =
                rule["rule"].as_str()?.split_once(&bound)?.1.chars().take_while(char::is_ascii_digit).collect();
            digits.parse().ok()
        };
        rules.iter().filter_map(after).min()
    };
    let of_field = maximum(&parent["properties"][field], "self");
    let of_parent = maximum(parent, &format!("self.{field}"));
    of_field.into_iter().chain(of_parent).min().unwrap_or_else(|| panic!("no rule bounds {path}"))
}

#[test]
fn the_api_takes_nothing_that_the_server_refuses() {
    for (path, limit) in [
        ("spec.replicas", u64::try_from(gantry_crds::MAX_REPLICAS).unwrap()),
        ("spec.runtime.contextSize", MAX_CTX_SIZE.into()),
        ("spec.runtime.parallel", MAX_PARALLEL.into()),
        ("spec.runtime.threads", MAX_THREADS.into()),
        ("spec.runtime.workers", MAX_WORKERS.into()),
        ("spec.runtime.gpuLayers", MAX_GPU_LAYERS.into()),
        ("spec.runtime.gpuSplit.mainGpu", u64::try_from(MAX_GPUS - 1).unwrap()),
        ("spec.scheduling.maxQueue", u64::try_from(MAX_QUEUE).unwrap()),
    ] {
        let maximum = api_maximum(path);
        assert!(maximum <= limit, "{path} may be {maximum}, and the server takes up to {limit}");
    }
    let crd = serde_json::to_string(&gantry_crds::InferenceService::crd()).unwrap();
    let drain = format!("duration(self.drainTimeout) <= duration('{}h')", MAX_DRAIN_SECONDS / 3600);
    assert!(crd.contains(&drain), "{drain}");
}

/// What a pod's command line asks for.
fn pod(args: &[&str]) -> Result<HttpSettings, Problems> {
    let names = ["--service=chat", "--namespace=test", "--pod=chat-0"];
    match read(&[&["pod"][..], &names[..], args].concat()).unwrap() {
        Command::Pod(args) => args.settings(),
        other => panic!("{other:?}"),
    }
}

/// As the operator writes it for a service's `spec.api`.
#[test]
fn a_pod_takes_what_the_api_of_its_service_asks_for() {
    let keys = tempfile::tempdir().unwrap();
    std::fs::write(keys.path().join("team-a"), "sesame").unwrap();
    let keys = format!("--api-key-file={}", keys.path().display());
    let origins = "--cors-origins=http://localhost:3000,https://chat.example.com";
    let http = pod(&[&keys, origins, "--alias=chat-large,gpt-4o", "--any-model"]).unwrap();
    let wanted = ["http://localhost:3000", "https://chat.example.com"].map(str::to_owned);
    assert_eq!(http.origins, Origins::parse(&wanted).unwrap());
    assert_eq!(http.names, ModelNames { aliases: vec!["chat-large".to_owned(), "gpt-4o".to_owned()], any: true });
    assert_ne!(http.keys, KeySources::default());
    assert_eq!(pod(&["--cors-origins=*"]).unwrap().origins, Origins::Any);
    let kept = pod(&["--response-store=file:///var/lib/gantry/responses", "--response-ttl=5400"]).unwrap().responses;
    let place = StorePlace::Directory("/var/lib/gantry/responses".into());
    assert_eq!(kept, Some(ResponseStoreSettings { place, time_to_live: Duration::from_secs(5400) }));
    let bucket = pod(&["--response-store=s3://responses/"]).unwrap().responses.unwrap();
    assert_eq!(bucket.time_to_live, Duration::from_secs(720 * 3600), "as the CRD says");
    assert!(matches!(bucket.place, StorePlace::S3 { bucket, .. } if bucket == "responses"));
    let problems = pod(&["--api-key-file=/nowhere", "--alias=a,"]).unwrap_err().to_string();
    assert!(problems.contains("--api-key-file") && problems.contains("--alias"), "{problems}");
}

/// The pattern that the API server holds a field of `spec.api` to, or each item of a list.
fn api_pattern(path: &str) -> String {
    let crd = serde_json::to_value(gantry_crds::InferenceService::crd()).unwrap();
    let mut field = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["api"];
    for name in path.split('.') {
        field = &field["properties"][name];
    }
    let is_set = field["x-kubernetes-list-type"] == "set" && field["maxItems"].is_u64();
    let text = if is_set { &field["items"] } else { field };
    assert!(text["type"] == "string" && text["maxLength"].is_u64(), "{path}: {field}");
    let rule = field["x-kubernetes-validations"][0]["rule"].as_str().unwrap();
    let (_, pattern) = rule.split_once("matches('^").unwrap();
    let (pattern, _) = pattern.split_once("$'").unwrap();
    // As CEL reads a string.
    pattern.replace(r"\\", r"\")
}

proptest::proptest! {
    #[test]
    fn a_pod_starts_with_every_name_and_origin_that_the_api_server_takes(
        origin in proptest::string::string_regex(&api_pattern("corsOrigins")).unwrap(),
        alias in proptest::string::string_regex(&api_pattern("modelAliases")).unwrap(),
        bucket in proptest::string::string_regex(&api_pattern("responseStore.s3.bucket")).unwrap(),
        prefix in proptest::string::string_regex(&api_pattern("responseStore.s3.prefix")).unwrap(),
    ) {
        let store = format!("s3://{bucket}/{prefix}");
        let flags = [("cors-origins", &origin), ("alias", &alias), ("response-store", &store)];
        let flags = flags.map(|(flag, value)| format!("--{flag}={value}"));
        let http = pod(&flags.each_ref().map(String::as_str));
        proptest::prop_assert!(http.is_ok(), "{http:?}");
        let http = http.unwrap();
        proptest::prop_assert_eq!(http.names.aliases, [alias]);
        proptest::prop_assert_eq!(http.responses.unwrap().place.to_string(), store);
    }
}

#[test]
fn flags_mean_what_they_mean_for_llama_server() {
    let settings = serve(&[
        "-c",
        "4096",
        "--parallel",
        "4",
        "-t",
        "3",
        "--gpu-layers",
        "20",
        "--device",
        "CUDA1, CUDA0",
        "--split-mode",
        "row",
        "--tensor-split",
        "3,1",
        "--main-gpu",
        "1",
        "--gpu-memory",
        "2048",
        "--memory-limit",
        "3072",
        "--cache-type-k",
        "q8_0",
        "-a",
        "chat",
        "--max-queue",
        "20",
        "--high-watermark",
        "16",
        "--low-watermark",
        "8",
        "--queue-timeout",
        "30",
        "--workers",
        "1",
        "--dispatch",
        "prefix-aware",
        "--kv-layout",
        "split",
        "--cache-ram",
        "64",
        "--cache-disk-dir",
        "/var/cache/prompts",
        "--cache-disk",
        "100",
        "--cache-ttl",
        "600",
        "--prompt-lookup",
        "6",
        "--model-draft",
        DRAFT,
        "--spec-draft-n-max",
        "4",
        "--step-ms-target",
        "80",
        "--chat-template",
        "{{ messages[0].content }}",
        "--spm-infill",
        "--matryoshka",
        "--embedding",
        "--pooling",
        "last",
        "--ubatch-size",
        "1024",
        "--embedding-batch",
        "16",
        "--embedding-wait-ms",
        "5",
    ]);
    let settings = settings.unwrap();
    let expected = RuntimeSettings {
        ctx_size: 4096,
        parallel: 4,
        threads: Some(3),
        cache_type: CacheType::Q8_0,
        gpu_layers: Some(20),
        gpu_split: GpuSplit {
            devices: vec!["CUDA1".to_owned(), "CUDA0".to_owned()],
            mode: SplitMode::Row,
            tensor_split: vec![3, 1],
            main_gpu: 1,
        },
        gpu_memory_bytes: Some(2 << 30),
        workers: Some(1),
        scheduling: Scheduling {
            max_queue: 20,
            high_watermark: Some(16),
            low_watermark: Some(8),
            queue_timeout_ms: Some(30_000),
            dispatch: DispatchStrategy::PrefixAware,
        },
        engine: EngineTuning {
            kv_layout: KvLayout::Split,
            cache_ram_bytes: Some(64 << 20),
            cache_disk: Some(DiskCacheConfig { dir: "/var/cache/prompts".into(), max_bytes: 100 << 20 }),
            cache_ttl_ms: Some(600_000),
            memory_limit_bytes: Some(3 << 30),
            lazy_cells: false,
            prompt_lookup: 6,
            draft: Some(DraftSettings { model_path: DRAFT.into(), max_tokens: 4 }),
            step_ms_target: Some(80),
            chat_template: Some("{{ messages[0].content }}".to_owned()),
            infill_suffix_first: true,
            stamps: Vec::new(),
        },
        pooled: Some(PooledConfig { pooling: Some(Pooling::Last), max_batch: 16, wait_ms: 5, batch_tokens: 1024 }),
        cuts_vectors: true,
    };
    assert_eq!((settings.version.runtime, settings.version.served_name), (expected, "chat".to_owned()));
    assert_eq!(settings.http.port, 8080);
}

#[test]
fn the_defaults_leave_the_choice_to_the_engine() {
    let settings = serve(&[]).unwrap();
    assert_eq!(settings.version.runtime, RuntimeSettings::default());
    assert_eq!(settings.version.served_name, "Cargo");
}

#[test]
fn a_file_whose_name_cannot_be_the_models_is_told_so_and_is_served_under_an_alias() {
    let folder = tempfile::tempdir().unwrap();
    for (name, shown) in [("a\nb.gguf", r#""a\nb""#), ("\u{1b}[31m.gguf", r#""\u{1b}[31m""#)] {
        let path = folder.path().join(name);
        std::fs::write(&path, "").unwrap();
        let serve = |args: &[&str]| {
            let all = ["gantry-server", "serve", "--model", path.to_str().unwrap()];
            match Cli::try_parse_from(all.into_iter().chain(args.iter().copied())).unwrap().command {
                Command::Serve(args) => args.settings(),
                other => panic!("{other:?}"),
            }
        };
        let problems = serve(&[]).unwrap_err();
        let must = "which must be 1 to 256 characters without control characters";
        let told =
            format!("--model: the name of the file cannot be the model's name, {must}, not {shown}; give --alias NAME");
        assert_eq!(problems.0, [told]);
        assert_eq!(serve(&["--alias", "chat"]).unwrap().version.served_name, "chat");
    }
}

#[test]
fn every_mistake_is_named_at_once() {
    let problems = serve(&[
        "--port",
        "70000",
        "--ctx-size",
        "many",
        "--parallel",
        "0",
        "--threads",
        "0",
        "--n-gpu-layers",
        "-2",
        "--device",
        "CUDA0,,CUDA1",
        "--split-mode",
        "column",
        "--tensor-split",
        "0.5,x",
        "--main-gpu",
        "16",
        "--gpu-memory",
        "0",
        "--memory-limit",
        "0",
        "--backend-dir",
        "/nowhere",
        "--cache-type-k",
        "q5",
        "--max-queue",
        "-1",
        "--drain-timeout",
        "1.5",
        "--alias",
        "",
        "--high-watermark",
        "x",
        "--low-watermark",
        "-2",
        "--queue-timeout",
        "0",
        "--workers",
        "0",
        "--dispatch",
        "fastest",
        "--kv-layout",
        "round",
        "--cache-ram",
        "-2",
        "--cache-disk-dir",
        "/var/cache/prompts",
        "--cache-disk",
        "0",
        "--cache-ttl",
        "0",
        "--prompt-lookup",
        "65",
        "--model-draft",
        "/nowhere",
        "--spec-draft-n-max",
        "0",
        "--step-ms-target",
        "0",
        "--chat-template",
        "chatml",
        "--pooling",
        "none",
        "--ubatch-size",
        "0",
        "--embedding-batch",
        "257",
        "--embedding-wait-ms",
        "-1",
    ])
    .unwrap_err();
    let flags = [
        "port",
        "ctx-size",
        "parallel",
        "threads",
        "n-gpu-layers",
        "device",
        "split-mode",
        "tensor-split",
        "main-gpu",
        "gpu-memory",
        "memory-limit",
        "backend-dir",
        "cache-type-k",
        "max-queue",
        "drain-timeout",
        "alias",
        "high-watermark",
        "low-watermark",
        "queue-timeout",
        "workers",
        "dispatch",
        "kv-layout",
        "cache-ram",
        "cache-disk",
        "cache-ttl",
        "prompt-lookup",
        "model-draft",
        "spec-draft-n-max",
        "step-ms-target",
        "chat-template",
        "pooling",
        "ubatch-size",
        "embedding-batch",
        "embedding-wait-ms",
    ];
    for flag in flags {
        let told = problems.0.iter().filter(|problem| problem.starts_with(&format!("--{flag} must be"))).count();
        assert_eq!(told, 1, "--{flag}: {problems}");
    }
    assert_eq!(problems.0.len(), flags.len(), "{problems}");
}

#[test]
fn layers_may_be_left_to_the_engine_or_be_all() {
    for (text, layers) in [("auto", None), ("-1", None), ("0", Some(0)), ("33", Some(33)), ("all", Some(ALL_LAYERS))] {
        assert_eq!(serve(&["--n-gpu-layers", text]).unwrap().version.runtime.gpu_layers, layers, "{text}");
    }
}

#[test]
fn settings_that_do_not_go_together_are_named() {
    for (args, flag) in [
        (["--max-queue", "4", "--high-watermark", "5"], "--high-watermark must be"),
        (["--high-watermark", "5", "--low-watermark", "5"], "--low-watermark must be"),
        (["--parallel", "1", "--workers", "2"], "--workers must be"),
        (["--reranking", "--pooling=mean", "--parallel", "2"], "--pooling must be rank"),
        (["--gpu-memory", "1000", "--n-gpu-layers", "0"], "--gpu-memory must be left out"),
        (["--gpu-memory", "1000", "--device", "none"], "--gpu-memory must be left out"),
    ] {
        let problems = serve(&args).unwrap_err();
        assert!(problems.0.len() == 1 && problems.0[0].starts_with(flag), "{problems}");
    }
}

#[test]
fn the_disk_tier_needs_a_directory_and_memory() {
    let disk = |args: &[&str]| serve(args).map(|settings| settings.version.runtime.engine.cache_disk);
    let dir = "--cache-disk-dir=/prompts";
    let defaults = DiskCacheConfig { dir: "/prompts".into(), max_bytes: DEFAULT_PREFIX_CACHE_DISK_BYTES };
    assert_eq!(disk(&[dir]).unwrap(), Some(defaults));
    for (args, flag) in [
        (&["--cache-disk", "100"][..], "--cache-disk must be"),
        (&[dir, "--cache-ram", "0"], "--cache-disk-dir must have"),
    ] {
        let problems = disk(args).unwrap_err();
        assert!(problems.0.len() == 1 && problems.0[0].starts_with(flag), "{problems}");
    }
}

#[test]
fn reranking_is_rank_pooling_and_nothing_is_pooled_unasked() {
    let pooled = |args: &[&str]| serve(args).unwrap().version.runtime.pooled;
    assert_eq!(pooled(&["--pooling", "mean"]), None);
    assert_eq!(pooled(&["--embeddings"]), Some(PooledConfig::default()));
    for args in [&["--reranking"][..], &["--rerank", "--embeddings"], &["--rerank", "--pooling", "rank"]] {
        let rank = PooledConfig { pooling: Some(Pooling::Rank), ..PooledConfig::default() };
        assert_eq!(pooled(args), Some(rank), "{args:?}");
    }
}

#[test]
fn keys_and_values_of_the_cache_have_one_type() {
    assert!(serve(&["--cache-type-k", "q8_0", "--cache-type-v", "q8_0"]).is_ok());
    assert!(serve(&["--cache-type-v", "q8_0"]).is_err());
}

/// What a whole command line asks for, or what is said of it.
fn read(line: &[&str]) -> Result<Command, String> {
    let words = ["gantry-server"].iter().chain(line).map(std::ffi::OsString::from);
    line::read_words(words, Vec::new()).map(|line| line.command).map_err(|error| error.to_string())
}

#[test]
fn a_model_is_named_by_a_flag_or_without() {
    let (file, other) = (concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"), DRAFT);
    let settings = |line: &[&str]| match read(line).unwrap() {
        Command::Serve(args) => args.settings(),
        other => panic!("{other:?}"),
    };
    for line in [&["serve", file][..], &["-m", file, "-np", "4"], &["serve", "--model", file], &[file, "-m", file]] {
        assert_eq!(settings(line).unwrap().version.model_path.to_str(), Some(file), "{line:?}");
    }
    let problems = settings(&["serve", file, "--model", other]).unwrap_err().to_string();
    assert!(problems.contains("two models"), "{problems}");
    let problems = settings(&["serve"]).unwrap_err().to_string();
    assert!(problems.contains("no model is named") && problems.contains("`gantry-server serve --help`"), "{problems}");
}

#[test]
fn a_flag_that_is_spelt_wrong_is_told_the_right_one() {
    for (line, told) in [
        (&["serve", "m.gguf", "--paralel", "4"][..], &["'--paralel'", "'--parallel'"][..]),
        // Of the command at hand.
        (&["check", "x", "--gate", "x", "--refernce", "y"], &["mean '--gates'?\n", "mean '--reference'?\n"]),
        (&["validate", "x", "--header-olny"], &["mean '--header-only'?"]),
        (&["check", "x", "--temprature", "1"], &["'--temprature' is not a flag of this server\n"]),
        (&["check", "x", "--zz", "1"], &["'--zz' is not a flag of this server\n"]),
        (&["m.gguf", "--temprature", "1"], &["mean '--temperature'? Instead: "]),
        (&["m.gguf", "--ctx", "4096"], &["mean '--ctx-size'?\n"]),
        (&["m.gguf", "--ctk", "q8_0"], &["mean '-ctk'?\n"]),
    ] {
        let error = read(line).unwrap_err();
        for part in told {
            assert!(error.contains(part), "{line:?}: {part:?} is not in {error}");
        }
    }
}

#[test]
fn no_secret_of_an_address_is_told() {
    for args in [
        ["--response-store", "s3://AK:HUSH@b/x"],
        ["--response-store", "s3://AK:HU/SH@b/x"],
        ["--response-store", "https://AK:HUSH@b"],
        ["--cors-origins", "https://me:HUSH@a"],
        ["--model-draft", "https://me:HUSH@"],
        ["--model-draft", "s3://me:HUSH@"],
        ["--model", "https://me:HUSH@h/m.gguf"],
        ["--chat-template-file", "https://me:HUSH@h/t"],
    ] {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        let Ok(Command::Serve(args)) = read(&[&["serve", file][..], &args].concat()) else { panic!("{args:?}") };
        let told = args.settings().unwrap_err().to_string();
        assert!(!told.contains("HU"), "{told}");
    }
}

#[test]
fn an_address_that_check_is_given_is_named_without_its_secrets() {
    let args = ["check", "https://me:HUSH@h/a.gguf?sig=HUSH", "--reference", "https://me:HUSH@h/b.gguf"];
    let Ok(Command::Check(args)) = read(&[&args[..], &["--cache-dir", "/tmp/x"]].concat()) else { panic!() };
    let settings = args.settings().unwrap();
    assert_eq!(settings.candidate.named.to_str(), Some("https://h/a.gguf"));
    assert_eq!(settings.reference.unwrap().named.to_str(), Some("https://h/b.gguf"));
}

#[test]
fn check_asks_for_as_much_context_as_a_service_must_have() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let settings = |ctx_size| match read(&["check", file, "--parallel", "255", "--ctx-size", ctx_size]) {
        Ok(Command::Check(args)) => args.settings(),
        other => panic!("{other:?}"),
    };
    assert!(settings("4080").is_ok());
    let told = settings("4079").unwrap_err().to_string();
    assert!(
        told.contains("--ctx-size must be at least 4080, 16 tokens for each of --parallel 255, and is 4079"),
        "{told}"
    );
}

#[test]
fn every_word_that_is_not_understood_is_told_at_once() {
    for (line, told) in [
        (
            &["m.gguf", "--paralel", "4", "--prot=8081", "--lora", "on", "--frobnicate", "x", "-c", "512"][..],
            &["'--parallel'", "'--port'", "'--lora'", "'--frobnicate' is not a flag", "4 settings"][..],
        ),
        (
            &["m.gguf", "--frobnicate", "n.gguf"],
            &["'--frobnicate'", "'n.gguf': nothing more is expected", "2 settings"],
        ),
        (&["--temp", "0.5", "--seed", "-2"], &["'--temp'", "'--seed'", "2 settings"]),
        (&["validate", "m.gguf", "--port", "1", "-ngl", "9"], &["'--port' is for `serve`", "'--n-gpu-layers' is for"]),
        (&["validate", "m.gguf", "-m", "m.gguf"], &["cannot be used with"]),
        (&["pod", "--ctx-size", "512", "--pots", "x"], &["'--ctx-size' is for `serve`", "'--pots' is not a flag"]),
        (
            &["missing"],
            &["'missing' is no command, and there is no such file", "serve, pod, validate, check, devices and config."],
        ),
        (&["serv"], &["Did you mean 'serve'?"]),
        (&["list"], &["'list' is no command", "`gantry-server validate FILE` looks at a file"]),
        (&["run", "llama3"], &["'run' is no command", "`gantry-server FILE` serves"]),
        (&["pull", "llama3"], &["'pull' is no command", "hf://owner/repository/path/model.gguf"]),
        (&["m.gguf", "-xyz"], &["'-xyz' is not a flag"]),
    ] {
        let error = read(line).expect_err(&line.join(" "));
        for part in told {
            assert!(error.contains(part), "{line:?}: {part:?} is not in {error}");
        }
    }
    for line in [&["validate", "-m", "m.gguf", "-np", "4"][..], &["validate", "m.gguf", "-c", "512", "-ub", "64"]] {
        assert!(read(line).is_ok(), "{line:?}");
    }
}

#[test]
fn what_the_environment_says_is_told_of_its_variable() {
    let problems = serve(&["--parallel", "x", "--port", "x", "--memory-limit", "10"]).unwrap_err();
    let parallel = line::arguments("serve").into_iter().find(|argument| argument.get_long() == Some("parallel"));
    let origin = Origin::Variable("GANTRY_PARALLEL".to_owned());
    let told = problems.told_of(&[Setting::new(&parallel.unwrap(), "parallel", Vec::new(), origin)]).to_string();
    for part in [
        "GANTRY_PARALLEL, which stands for --parallel, must be",
        "  --port must be",
        "from 64 to 16777216 MiB, not \"10\"",
    ] {
        assert!(told.contains(part), "{told}");
    }
}

#[test]
fn an_error_says_where_the_flags_are_listed() {
    for (line, help) in [
        (&["m.gguf", "--frobnicate"][..], "`gantry-server serve --help`"),
        (&["m.gguf", "--port"], "`gantry-server serve --help`"),
        (&["validate", "m.gguf", "--port", "1"], "`gantry-server validate --help`"),
        (&["serv"], "`gantry-server serve --help` the flags"),
    ] {
        let error = read(line).unwrap_err();
        assert!(error.contains(help) && error.matches("--help").count() <= 2, "{line:?}: {error}");
        assert!(!error.contains("Usage: gantry-server <COMMAND>"), "{line:?}: {error}");
    }
    let help = read(&["--help"]).unwrap_err();
    for line in [
        "  -m, --model FILE           the GGUF file or its address, instead of FILE",
        "      --host HOST            the address to listen on [127.0.0.1]",
        "      --port PORT            the port to listen on [8080]",
        "  -c, --ctx-size TOKENS      context of all sequences together [as the model was trained]",
        "  -np, --parallel N          requests that generate at once [8]",
        "  -t, --threads N            threads that compute [one less than the processors]",
        "  -ngl, --n-gpu-layers N     layers on GPUs [all that can be]",
        "  -a, --alias NAME           the model's name for clients [the file's]",
        "      --embeddings           embed texts on /v1/embeddings, too",
    ] {
        assert!(help.lines().any(|told| told.trim_end() == line), "{line:?} is not a line of {help}");
    }
    assert!(help.contains("gantry-server serve --help"), "{help}");
}

#[test]
fn help_names_the_short_forms_of_llama_server() {
    // Lines break where the terminal has them break.
    let help = read(&["serve", "--help"]).unwrap_err().split_whitespace().collect::<Vec<_>>().join(" ");
    let reference = include_str!("../../../docs/configuration.md");
    for form in ["-np", "-ngl", "-dev", "-sm", "-ts", "-mg", "-ctk", "-ctv", "-ub", "-cram", "-md"] {
        assert!(help.contains(&format!("[also: {form}]")), "{form} is not in {help}");
        assert!(reference.contains(&format!("`{form}`")), "{form} is not in the reference");
    }
}

//! `gantry-server`: the front, its workers and the check of model files, in one program.

use std::io::Write;
use std::num::NonZero;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use gantry_crds::pod::MODEL_VOLUMES_DIR;
use gantry_crds::status::Side;
use gantry_engine::{LoadError, PooledConfig};
use gantry_gguf::Header;
use gantry_server::agent::{self, AgentConfig, PodHas};
use gantry_server::api::{App, AppSettings};
use gantry_server::config::{
    self, BackendArgs, Command, ConfigCommand, HttpSettings, Line, PodArgs, Problems, ServeSettings, Setting,
};
use gantry_server::fetch::{FileStamp, Reach};
use gantry_server::front::FrontLimits;
use gantry_server::gates::limits::HEADROOM_RATIO;
use gantry_server::gates::report::quantity;
use gantry_server::gates::{context, file, memory, settings};
use gantry_server::hold::LineClosed;
use gantry_server::keys::ApiKeys;
use gantry_server::limits::AGENT_STOP_LIMIT;
use gantry_server::output::Output;
use gantry_server::processors::Processors;
use gantry_server::response_store::ResponseStore;
use gantry_server::routing::{Router, Routing};
use gantry_server::serve::{self, EXIT_SIGNAL_BASE, Ended, Ports};
use gantry_server::version::{Version, VersionSpec, WorkerConfig, label};
use gantry_server::{check, console, descriptors, processors, pull, telemetry, validate, worker};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// The exit code for settings that cannot be followed.
const EXIT_SETTINGS: u8 = 2;
/// Bodies and answers of at least so many bytes leave nothing behind in the front's memory.
const FRONT_LARGE_BLOCK_BYTES: u32 = 1 << 20;

fn main() -> ExitCode {
    let Line { command, settings, moot } = match config::read() {
        Ok(line) => line,
        // Its own way to say so: help is no error, and a mistake is exit code 2.
        Err(error) => error.exit(),
    };
    let code = match run(command, &settings, &moot) {
        Ok(code) => code,
        Err(error) => {
            let (text, code) = match error.downcast::<Problems>() {
                Ok(problems) => (problems.told_of(&settings).to_string(), ExitCode::from(EXIT_SETTINGS)),
                Err(error) => (format!("{error:#}"), ExitCode::FAILURE),
            };
            telemetry::write_lines(format!("gantry-server: {text}\n").as_bytes());
            code
        }
    };
    telemetry::flush();
    code
}

fn run(command: Command, settings: &[Setting], moot: &[String]) -> anyhow::Result<ExitCode> {
    match command {
        Command::Serve(args) => {
            let settings = args.settings()?;
            console::start();
            telemetry::init()?;
            moot.iter().for_each(|flag| tracing::warn!("{flag}"));
            descriptors::raise();
            block_on_front(serve_file(settings))
        }
        Command::Pod(args) => {
            let http = args.settings()?;
            telemetry::init()?;
            descriptors::raise();
            block_on_front(serve_service(*args, http))
        }
        Command::Validate(args) => {
            warn_of(moot);
            validate::run(args)
        }
        Command::Check(args) => {
            warn_of(moot);
            check::run(&args)
        }
        Command::Devices(args) => devices(&args),
        Command::Config(args) => match args.command {
            ConfigCommand::Check { file } => check_settings_file(&file),
            ConfigCommand::Show(args) => {
                warn_of(moot);
                print(&config::show(settings))?;
                // Shown all the same: where a value comes from is what one looks for who has to put it right.
                args.check()?;
                Ok(ExitCode::SUCCESS)
            }
        },
        Command::Template => {
            gantry_engine::serve_template().context("`gantry-server template` is started by a worker")?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Worker(args) => {
            telemetry::init()?;
            if !args.processors.is_empty()
                && let Err(error) = processors::keep_to(&args.processors)
            {
                // It is slower, not wrong: somebody has taken them away since the front looked.
                tracing::warn!(%error, "the worker runs on any processor");
            }
            // One thread moves frames; the engine has its own.
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                descriptors::survive_file_limits()?;
                worker::run(args.backends.dir()).await
            })?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Tells of flags that change nothing, where there is no log.
fn warn_of(moot: &[String]) {
    let told = moot.iter().map(|flag| format!("gantry-server: warning: {flag}\n"));
    telemetry::write_lines(told.collect::<String>().as_bytes());
}

fn print(text: &str) -> anyhow::Result<()> {
    std::io::stdout().write_all(text.as_bytes()).context("cannot write to stdout")
}

/// Says whether a file of settings may be used, or everything that is wrong with it.
fn check_settings_file(file: &Path) -> anyhow::Result<ExitCode> {
    match config::check_file(file) {
        Ok(count) => {
            print(&format!("{}: settings: {count}, mistakes: none\n", file.display()))?;
            Ok(ExitCode::SUCCESS)
        }
        Err(problems) => {
            telemetry::write_lines(format!("gantry-server: {problems}").as_bytes());
            Ok(ExitCode::FAILURE)
        }
    }
}

fn block_on_front(work: impl Future<Output = anyhow::Result<ExitCode>>) -> anyhow::Result<ExitCode> {
    gantry_engine::return_large_blocks(FRONT_LARGE_BLOCK_BYTES);
    // Said, so that no variable of the runtime's own is asked, whose mistakes it tells as its faults.
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()?;
    let result = runtime.block_on(async {
        descriptors::survive_file_limits()?;
        work.await
    });
    // Dropped, it would wait for disk work that nobody wants any more: hashing a large model takes minutes.
    runtime.shutdown_background();
    result
}

/// Opens a port, which one flag names and perhaps a variable.
async fn open(host: &str, port: u16, flag: &str) -> anyhow::Result<TcpListener> {
    serve::listen(host, port).await.map_err(|error| {
        let why = serve::why_not_listening(&error, flag);
        anyhow::anyhow!("cannot listen on {host}:{port}: {why}")
    })
}

/// Opens all ports and prints where: the one line that is ever written to standard output, for people and for scripts that
/// asked for port 0.
async fn ports(http: &HttpSettings) -> anyhow::Result<Ports> {
    let requests = open(&http.host, http.port, "--port").await?;
    let probes = match http.metrics_port {
        None => None,
        Some(port) => Some(open(&http.host, port, "--metrics-port").await?),
    };
    let calls = match http.grpc_port {
        None => None,
        Some(port) => Some(open(&http.host, port, "--grpc-port").await?),
    };
    let address = requests.local_addr()?;
    tracing::info!(%address, "listening");
    if let Some(calls) = &calls {
        tracing::info!(address = %calls.local_addr()?, "listening for gRPC");
    }
    if let Some(probes) = &probes {
        tracing::info!(address = %probes.local_addr()?, "listening for probes and metrics");
    }
    let mut out = std::io::stdout();
    writeln!(out, "listening on http://{address}").and_then(|()| out.flush()).context("cannot write to stdout")?;
    Ok(Ports { requests, probes, calls, origins: http.origins.clone() })
}

/// The memory of undelivered output, of which what nobody takes is thrown away.
fn watched_output(limits: &FrontLimits) -> Arc<Output> {
    let output = Output::new(limits.output_bytes);
    tokio::spawn(Arc::clone(&output).watch());
    output
}

/// Keys that may change, and responses that expire, watched.
fn app_settings(http: &HttpSettings, reach: Option<Reach>) -> anyhow::Result<AppSettings> {
    let keys = ApiKeys::new(http.keys.clone());
    tokio::spawn(Arc::clone(&keys).watch());
    let mut responses = None;
    if let Some(settings) = &http.responses {
        let opened = ResponseStore::open(settings, reach)
            .map_err(|why| anyhow::anyhow!("--response-store cannot be used: {why}"))?;
        tokio::spawn(Arc::clone(&opened).watch());
        tracing::info!(place = %settings.place, "responses are stored");
        responses = Some(opened);
    }
    Ok(AppSettings { keys, names: http.names.clone(), responses })
}

async fn serve_file(mut settings: ServeSettings) -> anyhow::Result<ExitCode> {
    // The first process of a container ends by no signal that it does not ask for. Where nothing is fetched none is asked for.
    let pulled = tokio::select! {
        biased;
        pulled = pull::pull(&settings.remote) => pulled.context("cannot fetch the model")?,
        signal = serve::told_to_end() => {
            console::shown();
            tracing::info!("ended while the model was fetched; what has come is kept, and the next start goes on from there");
            return Ok(ExitCode::from(EXIT_SIGNAL_BASE.saturating_add(signal?)));
        }
    };
    settings.use_files(pulled.model, pulled.draft);
    // They stay in the cache for as long as a worker may read them again.
    let _files = pulled.files;
    if let Some(dir) = settings.backend_dir.as_deref().filter(|dir| !settings::has_modules(dir)) {
        tracing::warn!(
            "--backend-dir {} has no backend (libggml-*.so): the CPU backend that is built in computes; `make backends` and \
             `make cuda` in a checkout put some into target/backends",
            dir.display()
        );
    }
    let limits = FrontLimits::within(memory::read().map(|memory| memory.limit_bytes));
    let output = watched_output(&limits);
    let workers = WorkerConfig::this_program()?.with_backend_dir(settings.backend_dir).with_output(output);
    // First, so that nobody is told of a port behind which there will never be a model.
    let spec = settled(settings.version, settings.encoder, &workers).await.context("cannot serve the model")?;
    let of_clients = app_settings(&settings.http, None)?;
    let ports = ports(&settings.http).await?;
    let url = format!("http://{}", serve::reachable(ports.requests.local_addr()?));
    let router = Router::new();
    router.hold_for_first(&spec);
    let app = App::new(Arc::clone(&router), workers.output(), limits, of_clients, None);
    let stop = CancellationToken::new();
    let load = tokio::spawn({
        let (router, stop) = (Arc::clone(&router), stop.clone());
        async move {
            // Ends the server unless it is disarmed: without its model it is of no use.
            let stop = stop.drop_guard();
            let (progress, share) = watch::channel(0.0);
            let bar = tokio::spawn(console::show_loading(spec.served_name.clone(), progress.subscribe()));
            let told = tokio::spawn(tell_waiting(Arc::clone(&router), share));
            let loaded = Version::load(spec, &workers, progress).await;
            bar.abort();
            told.abort();
            console::shown();
            let version = loaded?;
            router.set(Routing { active: Some(Arc::clone(&version)), ..Routing::default() });
            tell_ready(&url, &version);
            stop.disarm();
            anyhow::Ok(())
        }
    });
    // However the load ends without a model: nobody waits for one then.
    let given_up = tokio::spawn({
        let (router, stop) = (Arc::clone(&router), stop.clone());
        async move {
            stop.cancelled().await;
            router.held().close(LineClosed::NoModel);
        }
    });
    let ended = serve::run(ports, app, stop, settings.http.drain_timeout).await?;
    given_up.abort();
    let active = router.active();
    router.set(Routing::default());
    router.held().close(LineClosed::ServerEnds);
    match active {
        Some(version) => version.retire(Duration::ZERO).await,
        None => {
            // What it ended with, should it have ended by itself: it may be about to.
            load.abort();
            match load.await {
                Err(error) if error.is_cancelled() => {}
                ended => ended?.context("cannot serve the model")?,
            }
        }
    }
    ended.told().await;
    Ok(exit_code(&ended))
}

/// Tells those who wait for the first model how far its load is, until that is over.
async fn tell_waiting(router: Arc<Router>, mut share: watch::Receiver<f32>) {
    while share.changed().await.is_ok() {
        router.held().read_first(*share.borrow_and_update());
    }
}

/// As of a process that a signal ended, where one had requests cut off.
fn exit_code(ended: &Ended) -> ExitCode {
    match ended.cut_off_by {
        None => ExitCode::SUCCESS,
        Some(signal) => ExitCode::from(EXIT_SIGNAL_BASE.saturating_add(signal)),
    }
}

/// Says what is served and where, to logs and to people.
fn tell_ready(url: &str, version: &Version) {
    let Some(model) = version.model() else { return };
    let (spec, name) = (version.spec(), label(&model));
    tracing::info!(
        url,
        model = name,
        context_tokens = model.n_ctx_per_sequence,
        parallel = spec.runtime.parallel,
        kv_cells = model.kv_cells,
        "ready: {}{}",
        console::context_of(spec, &model),
        console::no_chats(&model).map(|why| format!("; chats: {why}")).unwrap_or_default()
    );
    if let Some(idle) = console::idle_context(spec, &model) {
        tracing::warn!("{idle}");
    }
    console::ready(url, spec, &model);
}

/// Serves what the agent makes active. Without its agent a pod would go on with its last model but follow no change,
/// so it ends with it, and the kubelet starts it anew.
async fn serve_service(args: PodArgs, http: HttpSettings) -> anyhow::Result<ExitCode> {
    let reach = Reach { private: args.private_sources, ..Reach::default() };
    let of_clients = app_settings(&http, Some(reach))?;
    let ports = ports(&http).await?;
    let limits = FrontLimits::within(memory::read().map(|memory| memory.limit_bytes));
    let output = watched_output(&limits);
    let workers = WorkerConfig::this_program()?.with_backend_dir(args.backends.backend_dir).with_output(output);
    let router = Router::new();
    let app = App::new(Arc::clone(&router), workers.output(), limits, of_clients, Some(args.service.clone()));
    let (stop, stop_agent) = (CancellationToken::new(), CancellationToken::new());
    let config = AgentConfig {
        service: args.service,
        namespace: args.namespace,
        pod: args.pod.clone(),
        cache_dir: args.cache_dir,
        model_volumes: MODEL_VOLUMES_DIR.into(),
        has: PodHas {
            pod: args.pod,
            volume_bytes: args.cache_bytes,
            resources: args.pod_resources,
            side: Side::of_label(args.side.as_deref()),
        },
        reach,
    };
    let agent = tokio::spawn({
        let (router, stop, stop_agent) = (Arc::clone(&router), stop.clone(), stop_agent.clone());
        async move {
            let _stop = stop.drop_guard();
            agent::run(config, router, workers, stop_agent).await
        }
    });
    // The agent goes on reporting while requests drain.
    let ended = serve::run(ports, app, stop.clone(), http.drain_timeout).await?;
    // The end of the agent is all that cancels it.
    let asked_to_end = !stop.is_cancelled();
    stop_agent.cancel();
    match timeout(AGENT_STOP_LIMIT, agent).await {
        Ok(agent) => agent?.context("the agent failed")?,
        Err(_) => tracing::warn!("the agent did not end within {} s", AGENT_STOP_LIMIT.as_secs()),
    }
    let Routing { active, canary, previous } = router.routing();
    router.set(Routing::default());
    router.held().close(LineClosed::ServerEnds);
    let loaded = active.into_iter().chain(canary.map(|(candidate, _)| candidate)).chain(previous);
    let retiring = loaded.map(|version| version.retire(Duration::ZERO));
    futures::future::join_all(retiring).await;
    ended.told().await;
    anyhow::ensure!(asked_to_end, "the agent ended by itself");
    Ok(exit_code(&ended))
}

/// Says what a worker would compute with, one line for each device.
fn devices(args: &BackendArgs) -> anyhow::Result<ExitCode> {
    let backends = match args.dir() {
        Some(dir) => gantry_engine::load_backends(&dir)?,
        None => gantry_engine::backends()?,
    };
    let mut text = format!("CPU backend {} ({})\n", backends.cpu, backends.cpu_features.join(" "));
    for device in &backends.devices {
        let (free, all) = (quantity(device.free_bytes), quantity(device.memory_bytes));
        let kind = device.kind.as_str();
        text.push_str(&format!("{}: {kind}, {}, {free} of {all} free\n", device.name, device.description));
    }
    for reason in &backends.not_loaded {
        text.push_str(&format!("{reason}\n"));
    }
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// The same, if its files pass the checks that every model's do, with what the model's header settles: as many layers on
/// GPUs as the memory that it may take there is for, on a CPU as many workers as its processors are good for, and as much
/// context for each request as memory allows.
async fn settled(
    mut version: VersionSpec,
    encoder: PooledConfig,
    workers: &WorkerConfig,
) -> anyhow::Result<VersionSpec> {
    let here = Processors::here();
    let runtime = &version.runtime;
    let several = runtime.workers_for(here) > runtime.worker_count();
    let (open_context, limited) = (context::is_open(runtime), runtime.engine.memory_limit_bytes.is_some());
    let gpu = match runtime.asks_for_gpus() {
        Some(asks) => asks,
        // Whoever cannot tell says so again as a worker, to whom it matters.
        None => (several || open_context || limited) && workers.finds_gpus().await.unwrap_or(true),
    };
    let fitted = tokio::task::spawn_blocking(move || {
        let draft = version.runtime.engine.draft.as_ref().map(|draft| draft.model_path.clone());
        // Before it is read: what a worker that starts again finds there must be what was checked.
        let mut files = Vec::new();
        let mut checked = |path: &Path| {
            let parts = gantry_gguf::part_paths(path);
            // One that is not there is told by who reads it.
            files.extend(parts.iter().filter_map(|part| FileStamp::looked_at(part).ok()));
            match file::check(path) {
                Ok(file) => Ok(file.header),
                // In the words of `validate`, which are whole without what caused them.
                Err(error) => Err(anyhow::anyhow!("{}: {error}", path.display())),
            }
        };
        let model = checked(&version.model_path)?;
        if model.summary().encoder {
            version.runtime.pooled.get_or_insert(encoder);
        }
        settings::check_pooling(version.runtime.pooled.as_ref(), &model)?;
        let (draft_path, draft) = (draft.clone(), draft.as_deref().map(checked).transpose()?);
        version.runtime.engine.stamps = files;
        if let (Some(draft_path), Some(draft)) = (draft_path, &draft)
            && let Some(reason) = settings::draft_mismatch(&model, draft)
        {
            anyhow::bail!(LoadError::Draft { draft: draft_path, model: version.model_path, reason });
        }
        let (model, draft) = (model.summary(), draft.as_ref().map(Header::summary));
        memory::fit_gpu(&mut version.runtime, model, draft).context("--gpu-memory")?;
        let memory = memory::read();
        if several && !gpu {
            memory::fit_workers(&mut version.runtime, model, draft, here, memory, HEADROOM_RATIO);
        }
        let memory = memory.map(|memory| memory.beside_front(memory.front_bytes(&version.runtime, 1)));
        context::fit_context(&mut version.runtime, model, draft, gpu, memory, HEADROOM_RATIO);
        memory::check_limit(&version.runtime, model, draft, gpu)?;
        if let Some(memory) = memory {
            settings::check_memory(&version.runtime, model, draft, gpu, memory)?;
        }
        // No other model will be loaded by what this one leaves.
        version.runtime.engine.lazy_cells = true;
        anyhow::Ok(version)
    });
    let version = fitted.await.context("the files' reader failed")??;
    // Whoever cannot tell says so again as a worker.
    if version.runtime.asks_for_gpus() == Some(true)
        && let Ok(Some(found)) = workers.lacks_gpus().await
    {
        anyhow::bail!(settings::NoGpu::new(&version.runtime, found));
    }
    Ok(version)
}

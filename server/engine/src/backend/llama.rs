//! The backend that computes: a llama.cpp context, and its model's vocabulary and chat template.

mod call_schema;
mod pooler;
mod stage;
#[cfg(test)]
mod tests;
mod vocabulary;

use std::io::Read;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use gantry_llama::{
    Backends, Batch, Context, ContextError, ContextParams, DecodeError, KvType, Model, ModelParams, TemplateSource,
};
use sha2::{Digest as _, Sha256};

use super::{BLOCK_TOKENS, Backend, BackendError, BackendLimits, BatchEntry, Chunk, Token};
use crate::cache::{Fingerprint, FingerprintParts};
use crate::cores::{Claim, Cores, ThreadLimit, Work};
use crate::draft::Draft;
use crate::error::LoadError;
use crate::event::ModelInfo;
use crate::kv_plan::{
    AUTO_UNIFIED_MAX_CELLS, CELLS_MULTIPLE, CacheType, KvLayout, MAX_COPY_BYTES_PER_STEP, scored_rows,
};
use crate::params::{EngineConfig, MAX_DRAFT_CATCH_UP_TOKENS};
use crate::plan::GROUP_TOKENS;
use crate::template::{Renderer, TemplateReport, Tryout};
pub(crate) use pooler::{LoadedPooler, pooler};
use stage::Stage;
pub(crate) use vocabulary::LlamaVocabulary;

/// Processors left to the rest of the machine when the thread count is not configured.
const SPARE_PROCESSORS: u32 = 1;

/// What is read of a model's file at a time where its digest is needed.
const HASHED_AT_A_TIME_BYTES: usize = 1 << 20;
/// The share that this is said to have of loading the model.
const NAMING_SHARE: f32 = 0.3;

/// Text tokenised once at load.
const LOAD_CHECK_TEXT: &str = "Hello, world!";

/// A llama.cpp context with the batch it reuses.
pub(crate) struct LlamaBackend {
    context: Context,
    batch: Batch,
    /// Where prompts are read that go into the pool afterwards.
    stage: Option<Stage>,
    positions: u32,
    unified: bool,
    group_rows: u32,
    scored_rows: u32,
    reusable: bool,
    token_bytes: u64,
    cores: Option<Arc<Cores>>,
    /// Ends the decode in progress when raised.
    abort: Arc<AtomicBool>,
}

/// A model that is ready to be warmed up.
pub(crate) struct Loaded {
    pub(crate) backend: LlamaBackend,
    pub(crate) draft: Option<Draft<LlamaBackend>>,
    pub(crate) vocabulary: LlamaVocabulary,
    pub(crate) info: ModelInfo,
    /// Names what saved state fits; `None`: state cannot be saved.
    pub(crate) fingerprint: Option<Fingerprint>,
    /// Tokens of a chat of one word; none where there are no chats.
    pub(crate) chat: Vec<Token>,
}

/// A model's weights, and those of the small one that guesses for it.
pub(crate) struct Opened {
    pub(crate) model: Arc<Model>,
    draft: Option<Arc<Model>>,
    backends: Backends,
    /// Names the model in what is kept of it.
    digest: String,
    /// What its contexts compute with, where that is a CPU.
    cores: Option<Arc<Cores>>,
}

/// Loads a model, and the one that guesses for it.
pub(crate) fn open(
    config: &EngineConfig,
    limit: &Arc<ThreadLimit>,
    progress: &mut dyn FnMut(f32) -> bool,
) -> Result<Opened, LoadError> {
    let backends = gantry_llama::init().map_err(|e| LoadError::Backend(e.to_string()))?.clone();
    let params = ModelParams {
        gpu_layers: config.gpu_layers,
        gpu_split: config.gpu_split.clone(),
        chat_template: config.chat_template.clone(),
    };
    let draft_path = config.speculation.draft_model.as_deref();
    // Of what is read, the model's part.
    let part = match draft_path {
        None => 1.0,
        Some(draft) => bytes_of(&config.model_path) / (bytes_of(&config.model_path) + bytes_of(draft)).max(1.0),
    };
    let names = config.model_digest.is_none() && config.prefix_cache.disk.is_some();
    let loading = if names { 1.0 - NAMING_SHARE } else { 1.0 };
    let model = load_model(&config.model_path, &params, &mut |fraction| progress(fraction * part * loading))?;
    // A vocabulary that contradicts itself ends the process in llama.cpp: better here than at the first request.
    model.tokenize(LOAD_CHECK_TEXT, true, true).map_err(|e| unusable(config, &e))?;
    let draft = match draft_path {
        None => None,
        Some(path) => {
            let mut progress = |fraction| progress((part + fraction * (1.0 - part)) * loading);
            // Nobody chats with it.
            Some(load_model(path, &ModelParams { chat_template: None, ..params }, &mut progress)?)
        }
    };
    let on_gpu = backends.gpus().next().is_some() && config.gpu_layers != Some(0);
    // That one processor is spared is no limit: where nobody said how many threads, two contexts may use them all.
    let all = config.threads.unwrap_or_else(processors);
    let cores = (!on_gpu).then(|| Arc::new(Cores::new(all, threads(config), Arc::clone(limit))));
    let digest = match &config.model_digest {
        Some(digest) => digest.clone(),
        None if names => digest_of(config, &mut |fraction| progress(loading + fraction * NAMING_SHARE))?,
        // It names nothing outside this process.
        None => String::new(),
    };
    Ok(Opened { model, draft, backends, digest, cores })
}

fn unusable(config: &EngineConfig, error: &impl std::fmt::Display) -> LoadError {
    LoadError::Model { path: config.model_path.clone(), reason: error.to_string() }
}

fn context_refused(error: ContextError) -> LoadError {
    match error {
        ContextError::Stateless => LoadError::GeneratesNothing,
        error => LoadError::Context { reason: error.to_string() },
    }
}

/// Makes a context that generates.
pub(crate) fn generator(config: &EngineConfig, opened: &Opened) -> Result<Loaded, LoadError> {
    context_and_template(config, opened).map_err(|error| match error {
        // It is not the file's.
        LoadError::Template(error) if config.chat_template.is_some() => LoadError::GivenTemplate(error),
        error => error,
    })
}

fn context_and_template(config: &EngineConfig, opened: &Opened) -> Result<Loaded, LoadError> {
    let model = opened.model.clone();
    let n_ctx = if config.ctx_size == 0 { model.n_ctx_train() } else { config.ctx_size };
    let share = n_ctx.div_ceil(config.parallel).next_multiple_of(CELLS_MULTIPLE);
    let gpu = opened.backends.gpus().next().is_some() && config.gpu_layers != Some(0);
    let plan = config.kv_layout.plan(n_ctx, config.parallel, config.cache_type, gpu);
    let pool = plan.pool_sequences;
    // Chosen by the engine, the pool is as large as the shares would be together, and a sequence takes no more than its
    // share: everybody's worst case fits, and what they do not use keeps prefixes.
    let (n_ctx, most) = match config.kv_layout {
        KvLayout::Auto if pool.is_some() => (share * config.parallel, share),
        KvLayout::Auto | KvLayout::Split | KvLayout::Whole => (n_ctx, share),
        KvLayout::Unified => (n_ctx, n_ctx),
    };
    // A state that cannot be cut is of no use to anyone once its request has ended, and takes memory for each sequence.
    let sequences = pool.filter(|_| !model.is_recurrent()).unwrap_or(config.parallel);
    let unified = pool.is_some();
    let abort = Arc::new(AtomicBool::new(false));
    // A row for each that generates and for each guess; llama.cpp asks for one for each sequence there is.
    let outputs = (config.parallel + config.speculation.most_tokens()).max(sequences);
    let scored_rows = scored_rows(gpu);
    let outputs = outputs + scored_rows;
    let tokens = config.prefill_tokens_per_step.saturating_add(config.parallel);
    let n_batch = plan.batch_tokens.map_or(tokens, |most| most.min(tokens)).max(outputs);
    let context_params = ContextParams {
        n_ctx,
        n_batch,
        sequences,
        threads: threads(config),
        kv_type: kv_type(config.cache_type),
        kv_unified: unified,
        flash_attention: plan.flash_attention,
        outputs: Some(outputs),
        lazy_cells: config.lazy_cells,
        abort: Some(abort.clone()),
        ..ContextParams::default()
    };
    check_has_text(config, &model)?;
    let source = TemplateSource::of(&model).map_err(LoadError::Template)?;
    let tryout = source.map(|source| Tryout::begin(config, model.clone(), source)).transpose()?;
    let mut context = Context::new(&model, &context_params).map_err(context_refused)?;
    let (template, tried) = tryout.map(Tryout::end).transpose()?.unzip();
    let (tried, chat): (_, Option<Vec<Token>>) = tried.unzip();
    check_length(config, &model, tried.as_ref())?;
    // llama.cpp computes past the trained length, but what comes out is noise.
    let positions = match model.n_ctx_train() {
        0 => context.n_ctx_per_sequence().min(most),
        trained => context.n_ctx_per_sequence().min(most).min(trained),
    };
    let info = ModelInfo {
        has_chat_template: template.is_some(),
        thinks: template.as_ref().is_some_and(Renderer::thinks),
        infills: model.infill_tokens().is_some(),
        template: tried.map(Box::new),
        kv_cells: context.n_ctx().into(),
        ..info(config, opened, positions)
    };
    let has_experts = model.has_experts();
    let vocabulary = LlamaVocabulary::new(model, template);
    let reusable = context.sliceable();
    let fingerprint = reusable.then(|| {
        let cache_type = format!("{:?}", config.cache_type);
        Fingerprint::new(&FingerprintParts {
            model_digest: &opened.digest,
            type_k: &cache_type,
            type_v: &cache_type,
            flash_attention: if context.flash_attention() { "on" } else { "off" },
            layout: "slices",
            payload_format: &context.state_fingerprint(),
        })
    });
    // Rows that choose their experts are multiplied with each expert's weights by themselves.
    let group_rows = if gpu || has_experts { 1 } else { GROUP_TOKENS };
    let cores = opened.cores.clone();
    cores.iter().for_each(|cores| cores.share());
    let stage = match plan.stage_cells.filter(|_| reusable && sequences > config.parallel) {
        Some(cells) => Stage::new(&opened.model, &mut context, &context_params, cells).map_err(context_refused)?,
        None => None,
    };
    let batch = Batch::new();
    let token_bytes = context.token_bytes() as u64;
    let backend = LlamaBackend {
        context,
        batch,
        stage,
        positions,
        unified,
        group_rows,
        scored_rows,
        reusable,
        token_bytes,
        cores,
        abort,
    };
    let draft = match &opened.draft {
        None => None,
        Some(draft) => Some(guesser(draft, &backend, &context_params, config)?),
    };
    Ok(Loaded { backend, draft, vocabulary, info, fingerprint, chat: chat.unwrap_or_default() })
}

fn useless(config: &EngineConfig, reason: String) -> LoadError {
    LoadError::Useless { path: config.model_path.clone(), reason }
}

/// Whether a model has anything to say: a token with text, which ends no answer.
fn check_has_text(config: &EngineConfig, model: &Model) -> Result<(), LoadError> {
    let mut text = Vec::new();
    let mut has_text = |token: Token| {
        !model.is_eog(token) && model.token_to_piece(token, false, &mut text).is_ok() && !text.is_empty()
    };
    let size = model.vocab_size();
    if (0..).take(size as usize).any(&mut has_text) {
        return Ok(());
    }
    let what = "control tokens or otherwise without text (tokenizer.ggml.token_type), so that every answer is empty";
    Err(useless(config, format!("all {size} tokens of its vocabulary are {what}")))
}

/// Whether the trained length has room for the shortest prompt and a token after it.
fn check_length(config: &EngineConfig, model: &Model, tried: Option<&TemplateReport>) -> Result<(), LoadError> {
    let (what, needs) = match tried {
        Some(report) => ("a chat of one word", report.shortest_tokens),
        None => ("a text of one letter", model.tokenize("a", true, true).map_or(1, |tokens| tokens.len() as u32)),
    };
    match model.n_ctx_train() {
        trained @ 1.. if trained <= needs => Err(useless(
            config,
            format!(
                "{what} takes {needs} tokens, an answer one more, and the model is said to be trained for {trained} \
                 (its context_length)"
            ),
        )),
        _ => Ok(()),
    }
}

/// Gives the small model a context of as many cells as the model's: a sequence for each that generates, which holds an
/// equal share. Where one may use more of a unified cache than that, there are no guesses past it.
fn guesser(
    model: &Arc<Model>,
    backend: &LlamaBackend,
    model_params: &ContextParams,
    config: &EngineConfig,
) -> Result<Draft<LlamaBackend>, LoadError> {
    let refused = |reason: String| LoadError::Draft {
        draft: config.speculation.draft_model.clone().unwrap_or_default(),
        model: config.model_path.clone(),
        reason,
    };
    if !backend.reusable {
        return Err(refused(String::from("the model's state cannot be cut, so that no guess could be taken back")));
    }
    if let Some(reason) = backend.context.model().vocabulary_mismatch(model) {
        return Err(refused(reason));
    }
    let share = backend.context.n_ctx().div_ceil(config.parallel).next_multiple_of(CELLS_MULTIPLE);
    let n_ctx = share.saturating_mul(config.parallel);
    let params = ContextParams {
        n_ctx,
        n_batch: MAX_DRAFT_CATCH_UP_TOKENS.saturating_add(config.parallel),
        sequences: config.parallel,
        outputs: None,
        kv_unified: n_ctx <= AUTO_UNIFIED_MAX_CELLS,
        flash_attention: true,
        ..model_params.clone()
    };
    let mut context = Context::new(model, &params).map_err(|e| LoadError::Context { reason: e.to_string() })?;
    context.share_threads(&backend.context);
    if !context.sliceable() {
        return Err(refused(String::from("its state cannot be cut, so that no wrong guess could be taken back")));
    }
    let trained = if model.n_ctx_train() == 0 { u32::MAX } else { model.n_ctx_train() };
    let positions = context.n_ctx_per_sequence().min(share).min(backend.positions).min(trained);
    let shared_vocab = backend.context.model().vocab_size().min(model.vocab_size());
    let (unified, group_rows, cores) = (params.kv_unified, backend.group_rows, backend.cores.clone());
    let (batch, stage, reusable, abort) = (Batch::new(), None, true, backend.abort.clone());
    // Nothing of it is saved, and no prompt's tokens are told by it.
    let (token_bytes, scored_rows) = (0, 0);
    let small = LlamaBackend {
        context,
        batch,
        stage,
        positions,
        unified,
        group_rows,
        scored_rows,
        reusable,
        token_bytes,
        cores,
        abort,
    };
    Ok(Draft::new(small, shared_vocab, config.speculation.draft_tokens))
}

/// The size of the files that will be read; where one cannot be, the load says so.
fn bytes_of(path: &Path) -> f32 {
    gantry_gguf::part_paths(path)
        .iter()
        .map(|path| std::fs::metadata(path).map_or(0.0, |metadata| metadata.len() as f32))
        .sum()
}

fn kv_type(cache_type: CacheType) -> KvType {
    match cache_type {
        CacheType::F16 => KvType::F16,
        CacheType::Q8_0 => KvType::Q8_0,
        CacheType::Q4_0 => KvType::Q4_0,
    }
}

/// What is known of a model whose sequences hold so many tokens.
fn info(config: &EngineConfig, Opened { model, backends, .. }: &Opened, positions: u32) -> ModelInfo {
    let text_of = |token: Option<Token>| {
        let mut text = Vec::new();
        // A token without a text is as good as none.
        let told = token.is_some_and(|token| model.token_to_piece(token, true, &mut text).is_ok());
        if told { String::from_utf8_lossy(&text).into_owned() } else { String::new() }
    };
    ModelInfo {
        bos: text_of(model.bos()),
        eos: text_of(model.eos()),
        description: model.description(),
        n_ctx_train: model.n_ctx_train(),
        n_ctx_per_sequence: positions,
        parallel: config.parallel,
        vocab_size: model.vocab_size(),
        parameters: model.parameters(),
        size_bytes: model.size_bytes(),
        backends: backends.clone(),
        ..ModelInfo::default()
    }
}

/// Takes the threads for a computation, where a CPU does it.
fn claim<'a>(cores: Option<&'a Cores>, work: Work, context: &mut Context) -> Option<Claim<'a>> {
    let claim = cores?.claim(work);
    context.set_threads(claim.threads);
    Some(claim)
}

/// The digest of a model's files: what it computed must not be taken for another's.
fn digest_of(config: &EngineConfig, progress: &mut dyn FnMut(f32) -> bool) -> Result<String, LoadError> {
    let unread = |e: std::io::Error| unusable(config, &e);
    let (mut hasher, mut part) = (Sha256::new(), vec![0; HASHED_AT_A_TIME_BYTES]);
    let (mut read, all) = (0, bytes_of(&config.model_path).max(1.0));
    for path in gantry_gguf::part_paths(&config.model_path) {
        let (mut file, _) = gantry_gguf::open(path).map_err(unread)?;
        loop {
            match file.read(&mut part).map_err(unread)? {
                0 => break,
                n => {
                    hasher.update(&part[..n]);
                    read += n;
                }
            }
            if !progress((read as f32 / all).min(1.0)) {
                return Err(LoadError::Aborted);
            }
        }
    }
    Ok(format!("sha256:{}", hex::encode(hasher.finalize())))
}

fn load_model(
    path: &Path,
    params: &ModelParams,
    progress: &mut dyn FnMut(f32) -> bool,
) -> Result<Arc<Model>, LoadError> {
    let refused = |reason: String| LoadError::Model { path: path.to_path_buf(), reason };
    // llama.cpp's own message for a file that cannot be opened names neither the cause nor the file, and a pipe it waits for.
    for part in gantry_gguf::part_paths(path) {
        gantry_gguf::open(part).map_err(|e| refused(e.to_string()))?;
    }
    Model::load(path, params, progress).map_err(|e| match e {
        gantry_llama::ModelError::Aborted => LoadError::Aborted,
        e @ (gantry_llama::ModelError::Gpu { .. } | gantry_llama::ModelError::Backend(_)) => {
            LoadError::Backend(e.to_string())
        }
        e => refused(e.to_string()),
    })
}

/// Threads that one context computes with.
fn threads(config: &EngineConfig) -> u32 {
    config.threads.unwrap_or_else(|| processors().saturating_sub(SPARE_PROCESSORS).max(1))
}

fn processors() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX))
}

impl LlamaBackend {
    /// The sequence of the pool that a staged one goes by; the last, which nobody else hears of.
    fn spare(&self) -> u32 {
        self.context.sequences() - 1
    }

    /// Has the stage hold nothing of a sequence that is to be filled otherwise, or dropped.
    fn leave_stage(&mut self, sequence: u32) {
        self.stage.iter_mut().for_each(|stage| stage.leave(sequence));
    }

    /// Has a sequence be in the pool.
    fn land_if(&mut self, sequence: u32) -> Result<(), BackendError> {
        if self.staged() == Some(sequence) { self.land() } else { Ok(()) }
    }
}

impl Backend for LlamaBackend {
    fn limits(&self) -> BackendLimits {
        let tokens_of = |bytes: u64| u32::try_from(bytes / self.token_bytes.max(1)).unwrap_or(u32::MAX);
        BackendLimits {
            sequences: self.context.sequences() - u32::from(self.stage.is_some()),
            positions: self.positions,
            batch_tokens: self.context.n_batch(),
            outputs: self.context.outputs() - self.scored_rows,
            scored_rows: self.scored_rows,
            unified: self.unified,
            // A quarter of what a step copies on the way there, another on the way back.
            stage: self.stage.as_ref().map(|stage| stage.positions().min(tokens_of(MAX_COPY_BYTES_PER_STEP / 4))),
            flash_attention: self.context.flash_attention(),
            group_rows: self.group_rows,
            reusable: self.reusable,
            token_bytes: self.token_bytes,
            total_cells: u64::from(self.context.n_ctx()),
        }
    }

    fn interrupt(&self) -> Option<Arc<AtomicBool>> {
        Some(self.abort.clone())
    }

    fn untouched_bytes(&self) -> u64 {
        self.context.untouched_bytes() + self.stage.as_ref().map_or(0, Stage::untouched_bytes)
    }

    fn decode(&mut self, batch: &[BatchEntry]) -> Result<(), BackendError> {
        let staged = self.stage.as_mut().map_or(0..0, |stage| stage.entries_of(batch));
        self.batch.clear();
        for entry in batch[..staged.start].iter().chain(&batch[staged.end..]) {
            self.batch.add(entry.token, entry.position, entry.sequence, entry.output);
        }
        let claim = claim(self.cores.as_deref(), Work::Generation, &mut self.context);
        // First, since it alone may find no cells, after which nothing must have been decoded.
        if !self.batch.is_empty() {
            self.context.decode(&mut self.batch).map_err(|e| match e {
                DecodeError::NoKvCells => BackendError::NoKvCells,
                e => BackendError::Failed(e.to_string()),
            })?;
        }
        let Some(stage) = self.stage.as_mut().filter(|_| !staged.is_empty()) else { return Ok(()) };
        stage.decode(batch, claim.as_ref().map(|claim| claim.threads))?;
        drop(claim);
        // What follows the prompt is computed with all others.
        if batch[staged.end - 1].output { self.land() } else { Ok(()) }
    }

    fn logits(&mut self, index: usize) -> Option<&[f32]> {
        let Some(stage) = &mut self.stage else { return self.context.logits(index) };
        match stage.place(index) {
            Ok(place) => stage.logits(place),
            Err(place) => self.context.logits(place),
        }
    }

    fn scrub(&mut self) {
        self.stage.iter_mut().for_each(Stage::scrub);
        self.context.scrub();
    }

    fn clear_sequence(&mut self, sequence: u32) {
        self.leave_stage(sequence);
        // Dropping a whole sequence cannot fail; one that does not exist holds nothing.
        if let Err(e) = self.context.remove(sequence, 0) {
            tracing::error!(sequence, error = %e, "a sequence could not be cleared");
        }
    }

    fn truncate(&mut self, sequence: u32, len: u32) -> Result<(), BackendError> {
        if let Some(stage) = self.stage.as_mut().filter(|stage| stage.sequence() == Some(sequence)) {
            stage.truncate(len)?;
        }
        cut(&mut self.context, sequence, len)
    }

    fn copy(&mut self, from: u32, to: u32, len: u32) -> Result<(), BackendError> {
        self.leave_stage(to);
        self.land_if(from)?;
        self.context.copy(from, to, Some(len)).map_err(|e| BackendError::Failed(e.to_string()))
    }

    fn save(&mut self, sequence: u32, positions: Range<u32>) -> Result<Vec<Vec<u8>>, BackendError> {
        self.land_if(sequence)?;
        self.context.save(sequence, positions, BLOCK_TOKENS).map_err(|e| BackendError::Failed(e.to_string()))
    }

    fn restore(&mut self, sequence: u32, chunks: &[Chunk<'_>]) -> Result<(), BackendError> {
        self.leave_stage(sequence);
        let chunks: Vec<(u32, &[u8])> = chunks.iter().map(|chunk| (chunk.tokens, chunk.bytes)).collect();
        self.context.restore(sequence, &chunks).map(drop).map_err(|e| BackendError::Failed(e.to_string()))
    }

    fn staged(&self) -> Option<u32> {
        self.stage.as_ref()?.sequence()
    }

    fn stage(&mut self, sequence: u32) -> Result<(), BackendError> {
        let Some(stage) = &mut self.stage else { return Ok(()) };
        stage.enter(&mut self.context, sequence).map_err(|e| BackendError::Failed(e.to_string()))
    }

    fn land(&mut self) -> Result<(), BackendError> {
        let spare = self.spare();
        let Some(stage) = &mut self.stage else { return Ok(()) };
        stage.land(&mut self.context, spare).map_err(|e| BackendError::Failed(e.to_string()))
    }
}

/// Drops what a sequence holds past its first `len` tokens.
fn cut(context: &mut Context, sequence: u32, len: u32) -> Result<(), BackendError> {
    match context.remove(sequence, len) {
        Ok(true) => Ok(()),
        Ok(false) => Err(BackendError::Failed(String::from("the model's state cannot be cut"))),
        Err(e) => Err(BackendError::Failed(e.to_string())),
    }
}

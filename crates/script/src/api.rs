//! What scripts can call, each once.

use std::cmp::Ordering;
use std::ops::Range;

use microserving_router::Error;
use rhai::{Array, Dynamic, FLOAT, FnPtr, FuncRegistration, INT, ImmutableString, Module, NativeCallContext};
use xxhash_rust::xxh3::xxh3_64;

use crate::fault::CallError;
use crate::handles::{
    CtxHandle, EngineHandle, PreparedHandle, ReqHandle, SeatHandle, Started, TokensHandle, positive, wrong,
};
use crate::run::Fallible;

macro_rules! method {
    ($module:ident, $name:literal, $function:expr) => {
        FuncRegistration::new($name).in_global_namespace().set_into_module(&mut $module, $function);
    };
}
macro_rules! property {
    ($module:ident, $name:literal, $function:expr) => {
        FuncRegistration::new_getter($name).set_into_module(&mut $module, $function);
    };
}

/// Makes the module of our own functions.
pub(crate) fn module() -> Module {
    let mut module = Module::new();
    types(&mut module);
    module.combine(ctx()).combine(request()).combine(engine()).combine(seat()).combine(values());
    module
}

/// Names the types as errors call them.
fn types(module: &mut Module) {
    module
        .set_custom_type::<CtxHandle>("Ctx")
        .set_custom_type::<ReqHandle>("Request")
        .set_custom_type::<EngineHandle>("Engine")
        .set_custom_type::<SeatHandle>("Seat")
        .set_custom_type::<PreparedHandle>("Prepared")
        .set_custom_type::<TokensHandle>("Tokens")
        .set_custom_type::<Started>("Answer")
        .set_custom_type::<CallError>("CallError");
}

fn ctx() -> Module {
    let mut module = Module::new();
    method!(module, "decoder", CtxHandle::decoder);
    method!(module, "prefiller", CtxHandle::prefiller);
    method!(module, "seat", CtxHandle::seat);
    method!(module, "engines", CtxHandle::engines);
    method!(module, "decoders", CtxHandle::decoders);
    method!(module, "prefillers", CtxHandle::prefillers);
    method!(module, "log", |ctx: &mut CtxHandle, text: ImmutableString| ctx.0.log(&text));
    method!(module, "param", |ctx: &mut CtxHandle, name: ImmutableString, default: Dynamic| {
        param(ctx, &name, default)
    });
    property!(module, "attempt", |ctx: &mut CtxHandle| INT::from(ctx.0.ctx.attempt().0));
    module
}

/// Returns a parameter of the pattern. The loader has found its declaration in the source, so it is there.
fn param(ctx: &CtxHandle, name: &str, default: Dynamic) -> Dynamic {
    use serde_json::Value;
    match ctx.0.parameters.get(name) {
        Some(Value::Bool(flag)) => (*flag).into(),
        Some(Value::Number(number)) if default.is_int() => number.as_i64().map_or(default, Dynamic::from_int),
        Some(Value::Number(number)) => number.as_f64().map_or(default, Dynamic::from_float),
        Some(Value::String(text)) => text.clone().into(),
        _ => default,
    }
}

fn request() -> Module {
    let mut module = Module::new();
    property!(module, "len", |req: &mut ReqHandle| INT::from(req.0.request.len()));
    property!(module, "tokens", |req: &mut ReqHandle| req.tokens());
    method!(module, "prefix", |req: &mut ReqHandle, tokens: INT| req.tokens().slice(0, tokens));
    property!(module, "model", |req: &mut ReqHandle| {
        req.0.request.model().unwrap_or_default().to_owned()
    });
    property!(module, "tenant", |req: &mut ReqHandle| req.0.request.tenant().to_owned());
    method!(module, "header", |req: &mut ReqHandle, name: ImmutableString| {
        // One that is not there is empty, as one that is not text.
        req.0.request.header(&name).unwrap_or_default().to_owned()
    });
    property!(module, "priority", |req: &mut ReqHandle| INT::from(req.0.request.params().priority));
    property!(module, "max_tokens", |req: &mut ReqHandle| {
        req.0.request.params().max_tokens.map_or(Dynamic::UNIT, |most| INT::from(most).into())
    });
    property!(module, "len", |tokens: &mut TokensHandle| tokens.len());
    FuncRegistration::new_index_getter()
        .set_into_module(&mut module, |tokens: &mut TokensHandle, at: INT| tokens.get(at));
    FuncRegistration::new_index_getter()
        .set_into_module(&mut module, |tokens: &mut TokensHandle, range: Range<INT>| {
            tokens.slice(range.start, range.end)
        });
    method!(module, "hash", |tokens: TokensHandle| tokens.hash());
    method!(module, "hash", |text: ImmutableString| positive(xxh3_64(text.as_bytes())));
    module
}

fn engine() -> Module {
    let mut module = Module::new();
    property!(module, "name", |e: &mut EngineHandle| e.engine.name().to_owned());
    property!(module, "number", |e: &mut EngineHandle| INT::from(e.engine.number()));
    property!(module, "role", |e: &mut EngineHandle| e.engine.role().name());
    property!(module, "health", |e: &mut EngineHandle| e.health());
    property!(module, "load", |e: &mut EngineHandle| INT::from(e.engine.load().requests));
    property!(module, "queued_tokens", |e: &mut EngineHandle| {
        INT::try_from(e.engine.load().queued_tokens).unwrap_or(INT::MAX)
    });
    property!(module, "held", |e: &mut EngineHandle| INT::from(e.run.held(&e.engine)));
    property!(module, "weight", |e: &mut EngineHandle| e.engine.weight());
    property!(module, "ttft", |e: &mut EngineHandle| e.predict().ttft.as_secs_f64());
    property!(module, "tpot", |e: &mut EngineHandle| e.predict().tpot.as_secs_f64());
    property!(module, "free_pages", |e: &mut EngineHandle| {
        let pages = e.engine.state().map(|state| state.pages.free.saturating_add(state.pages.cached));
        INT::from(pages.unwrap_or(0))
    });
    method!(module, "==", |a: EngineHandle, b: EngineHandle| a.engine.number() == b.engine.number());
    method!(module, "!=", |a: EngineHandle, b: EngineHandle| a.engine.number() != b.engine.number());
    module
}

fn seat() -> Module {
    let mut module = Module::new();
    property!(module, "engine", SeatHandle::engine);
    method!(module, "prep_recv", SeatHandle::prep_recv);
    method!(module, "remote_send", SeatHandle::remote_send);
    method!(module, "start_generate", SeatHandle::start_generate);
    // `ctx.prefiller` may answer nothing, so a seat is compared with that.
    method!(module, "==", |_: SeatHandle, (): ()| false);
    method!(module, "!=", |_: SeatHandle, (): ()| true);
    method!(module, "==", |(): (), _: SeatHandle| false);
    method!(module, "!=", |(): (), _: SeatHandle| true);
    property!(module, "matched", |prepared: &mut PreparedHandle| prepared.matched());
    property!(module, "end", |prepared: &mut PreparedHandle| INT::from(prepared.end));
    property!(module, "status", |error: &mut CallError| INT::from(error.0.to_api_error().status));
    property!(module, "reason", |error: &mut CallError| error.0.reason());
    property!(module, "during", |error: &mut CallError| match &error.0 {
        Error::Call { call, .. } => *call,
        _ => "",
    });
    method!(module, "to_string", |error: &mut CallError| error.0.to_string());
    module
}

/// What arrays lack, and what the interpreter's own sorting would do with a closure that contradicts itself: panic.
fn values() -> Module {
    let mut module = Module::new();
    method!(module, "min_by", |context: NativeCallContext, array: &mut Array, key: FnPtr| {
        pick(&context, array, &key, Ordering::Less)
    });
    method!(module, "max_by", |context: NativeCallContext, array: &mut Array, key: FnPtr| {
        pick(&context, array, &key, Ordering::Greater)
    });
    method!(module, "sorted_by", |context: NativeCallContext, array: &mut Array, key: FnPtr| {
        sorted(&context, array, &key)
    });
    module
}

fn pick(context: &NativeCallContext, array: &Array, key: &FnPtr, better: Ordering) -> Fallible<Dynamic> {
    let best = best(&keys(context, array, key)?, better);
    Ok(best.map_or(Dynamic::UNIT, |at| array[at].clone()))
}

fn sorted(context: &NativeCallContext, array: &Array, key: &FnPtr) -> Fallible<Array> {
    let mut keyed: Vec<(Key, Dynamic)> =
        keys(context, array, key)?.into_iter().zip(array.iter().cloned()).collect();
    keyed.sort_by(|(a, _), (b, _)| a.order(b));
    Ok(keyed.into_iter().map(|(_, value)| value).collect())
}

const MIXED: &str = "the closure must return numbers only, or strings only";

/// What a closure returned to sort by. All keys of one array are of one kind, so their order is total.
#[derive(Clone, Debug)]
enum Key {
    Integer(INT),
    Number(FLOAT),
    Text(ImmutableString),
}

impl Key {
    fn order(&self, other: &Self) -> Ordering {
        match (self, other) {
            (Self::Integer(a), Self::Integer(b)) => a.cmp(b),
            (Self::Number(a), Self::Number(b)) => a.total_cmp(b),
            (Self::Text(a), Self::Text(b)) => a.as_str().cmp(b.as_str()),
            _ => Ordering::Equal,
        }
    }
}

fn keys(context: &NativeCallContext, array: &Array, key: &FnPtr) -> Fallible<Vec<Key>> {
    let mut keys = Vec::with_capacity(array.len());
    for value in array {
        let key: Dynamic = key.call_within_context(context, (value.clone(),))?;
        keys.push(if let Ok(value) = key.as_int() {
            Key::Integer(value)
        } else if let Ok(value) = key.as_float() {
            Key::Number(value)
        } else if let Ok(text) = key.into_immutable_string() {
            Key::Text(text)
        } else {
            return Err(wrong(MIXED));
        });
    }
    let texts = keys.iter().filter(|key| matches!(key, Key::Text(_))).count();
    if texts != 0 && texts != keys.len() {
        return Err(wrong(MIXED));
    }
    if keys.iter().any(|key| matches!(key, Key::Number(_))) {
        for key in &mut keys {
            #[allow(clippy::cast_precision_loss, reason = "beside fractions, the last digits do not matter")]
            if let Key::Integer(value) = key {
                *key = Key::Number(*value as FLOAT);
            }
        }
    }
    Ok(keys)
}

/// Returns the place of the first key that none is better than.
fn best(keys: &[Key], better: Ordering) -> Option<usize> {
    let mut best = None;
    for (at, key) in keys.iter().enumerate() {
        if best.is_none_or(|before: usize| key.order(&keys[before]) == better) {
            best = Some(at);
        }
    }
    best
}

//! The language: which of the interpreter's packages there are, and how a run is bounded.
//!
//! Left out on purpose: what sleeps, exits, reads the clock or files, loads modules, or makes code of strings.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock};

use rhai::packages::{
    ArithmeticPackage, BasicArrayPackage, BasicFnPackage, BasicIteratorPackage, BasicMapPackage,
    BasicMathPackage, BasicStringPackage, LogicPackage, MoreStringPackage, Package,
};
use rhai::{AST, Dynamic, Engine, Module, OptimizationLevel, ParseError, Scope, Shared};

use crate::api;
use crate::fault::{Failure, Fault, judge};
use crate::handles::{CtxHandle, ReqHandle};
use crate::limits::Limits;
use crate::run::Run;

/// Words of the interpreter that a script could use to get around the checks before it runs.
const DISABLED: [&str; 5] = ["eval", "Fn", "call", "curry", "is_def_fn"];
/// Expressions within expressions: enough for anything a person writes.
const EXPRESSION_DEPTH: usize = 32;
const FUNCTIONS: usize = 32;

/// The names that every script has.
pub(crate) const CTX: &str = "ctx";
pub(crate) const REQ: &str = "req";

/// All functions, made once: an interpreter is made anew for each run and shares them.
static MODULES: LazyLock<Vec<Shared<Module>>> = LazyLock::new(|| {
    let mut modules: Vec<Shared<Module>> = vec![
        ArithmeticPackage::new().as_shared_module(),
        BasicStringPackage::new().as_shared_module(),
        BasicIteratorPackage::new().as_shared_module(),
        BasicFnPackage::new().as_shared_module(),
        LogicPackage::new().as_shared_module(),
        BasicMathPackage::new().as_shared_module(),
        BasicArrayPackage::new().as_shared_module(),
        BasicMapPackage::new().as_shared_module(),
        MoreStringPackage::new().as_shared_module(),
    ];
    // The last one is searched first.
    modules.push(Shared::new(api::module()));
    modules
});

/// Makes an interpreter with the bounds of values and nesting.
pub(crate) fn interpreter(limits: &Limits) -> Engine {
    let mut engine = Engine::new_raw();
    for module in &*MODULES {
        engine.register_global_module(module.clone());
    }
    for word in DISABLED {
        engine.disable_symbol(word);
    }
    // Folding constants would move the positions that errors speak of.
    engine.set_optimization_level(OptimizationLevel::None);
    engine.set_strict_variables(true);
    engine
        .set_max_expr_depths(EXPRESSION_DEPTH, EXPRESSION_DEPTH)
        .set_max_functions(FUNCTIONS)
        .set_max_call_levels(limits.call_levels)
        .set_max_variables(limits.variables)
        .set_max_array_size(limits.array_size)
        .set_max_map_size(limits.map_size)
        .set_max_string_size(limits.string_bytes);
    engine
}

/// Turns source text into what can be run.
pub(crate) fn parse(engine: &Engine, source: &str) -> Result<AST, ParseError> {
    // The values do not matter here, the names do: a variable that is neither is refused.
    let mut scope = Scope::new();
    scope.push(CTX, ()).push(REQ, ());
    engine.compile_with_scope(&scope, source)
}

/// Runs a script to its end on this thread.
pub(crate) fn evaluate(ast: &AST, run: &Arc<Run>) -> Result<(), Failure> {
    let mut engine = interpreter(&run.limits);
    let watch = run.clone();
    engine.on_progress(move |_| watch.tick().map(Dynamic::from));
    let log = run.clone();
    engine.on_print(move |text| log.log(text));
    let log = run.clone();
    engine.on_debug(move |text, _, _| log.log(text));
    let mut scope = Scope::new();
    scope.push(CTX, CtxHandle(run.clone())).push(REQ, ReqHandle(run.clone()));
    run.begin();
    // The interpreter has a few assertions of its own; one that fails must cost one request, not a thread.
    let evaluated = catch_unwind(AssertUnwindSafe(|| engine.eval_ast_with_scope::<Dynamic>(&mut scope, ast)));
    match evaluated {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(judge(*error)),
        Err(_) => Err(Failure::Fault(Fault::new("panic", "the interpreter panicked"))),
    }
}

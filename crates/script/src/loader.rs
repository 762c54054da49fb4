//! From source text to a program.

use std::sync::Arc;

use async_trait::async_trait;
use microserving_protocol::ApiError;
use microserving_router::{BadScript, Pattern, Patterns, ProgramLoader, Script};
use rhai::{AST, ASTNode, Engine, Expr, Position, Stmt};
use serde_json::Value;

use crate::check::{bad, check};
use crate::dry_run::{self, Trace};
use crate::language::{interpreter, parse};
use crate::limits::Limits;
use crate::pool::Pool;
use crate::program::ScriptFactory;

/// The constant by which a script names the pattern that serves what it cannot.
const FALLBACK: &str = "FALLBACK";
const DEFAULT_FALLBACK: &str = "data_parallel";

/// Loads scripts. All that one loader has loaded share its threads.
#[derive(Clone, Debug)]
pub struct ScriptLoader {
    limits: Arc<Limits>,
    pool: Arc<Pool>,
}

impl ScriptLoader {
    /// Makes a loader. Starts no threads yet.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        let pool = Arc::new(Pool::new(limits.concurrent_runs));
        Self { limits: Arc::new(limits), pool }
    }

    /// Checks a script and makes it ready to run. Changes nothing.
    ///
    /// # Errors
    /// The first thing that is wrong, with line and column.
    pub fn compile(&self, name: &str, source: &str, patterns: &Patterns) -> Result<ScriptFactory, BadScript> {
        if source.len() > self.limits.source_bytes {
            let message = format!("{} bytes, at most {} are taken", source.len(), self.limits.source_bytes);
            return Err(bad(Position::NONE, message));
        }
        let engine: Engine = interpreter(&self.limits);
        let ast =
            parse(&engine, source).map_err(|error| bad(error.position(), error.err_type().to_string()))?;
        let parameters = check(&engine, &ast)?;
        let (fallback, position) = fallback(&ast)?;
        let fallback: Pattern = fallback
            .parse()
            .map_err(|error: microserving_router::BadPattern| bad(position, error.to_string()))?;
        let fallback =
            patterns.fallback(&fallback).map_err(|error| bad(position, format!("{FALLBACK}: {error}")))?;
        let (limits, pool) = (self.limits.clone(), self.pool.clone());
        Ok(ScriptFactory::new(name, source, ast, parameters, fallback, limits, pool))
    }
}

#[async_trait]
impl ProgramLoader for ScriptLoader {
    fn load(&self, name: &str, source: &str, patterns: &Patterns) -> Result<Arc<dyn Script>, BadScript> {
        Ok(Arc::new(self.compile(name, source, patterns)?))
    }

    async fn dry_run(
        &self,
        name: &str,
        source: &str,
        patterns: &Patterns,
        trace: Option<&[u8]>,
    ) -> Result<Value, ApiError> {
        let script = self.compile(name, source, patterns).map_err(|bad| bad.to_api_error())?;
        let trace = match trace {
            Some(bytes) => Trace::parse(bytes)?,
            None => Trace::small(),
        };
        dry_run::run(script, trace).await
    }
}

/// Returns the pattern that `const FALLBACK = "…";` names, and where.
fn fallback(ast: &AST) -> Result<(String, Position), BadScript> {
    let mut found = Ok((DEFAULT_FALLBACK.to_owned(), Position::NONE));
    ast.walk(&mut |path| {
        if let [ASTNode::Stmt(Stmt::Var(variable, ..))] = path
            && variable.0.name == FALLBACK
        {
            found = match &variable.1 {
                Expr::StringConstant(name, position) => Ok((name.to_string(), *position)),
                other => Err(bad(other.position(), format!("{FALLBACK} must be a text that is written out"))),
            };
            return false;
        }
        true
    });
    found
}

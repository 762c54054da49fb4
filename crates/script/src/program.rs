//! A script as a program.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use microserving_router::{
    BadPattern, Ctx, Error, Fallback, Parameter, Parameters, Program, ProgramFactory, Request, Script,
    ScriptCounts, TokenStream,
};
use rhai::{AST, ASTNode, Expr};
use tokio::sync::oneshot;
use tracing::warn;

use crate::fault::{Failure, Fault};
use crate::language::evaluate;
use crate::limits::Limits;
use crate::pool::Pool;
use crate::run::{Answer, Call, Command, Run};

/// A script that was checked, and makes programs for any values of its parameters.
#[derive(Clone, Debug)]
pub struct ScriptFactory(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    name: Arc<str>,
    source: String,
    ast: Arc<AST>,
    parameters: Vec<Parameter>,
    moves_kv: bool,
    fallback: Fallback,
    limits: Arc<Limits>,
    pool: Arc<Pool>,
    runs: AtomicU64,
    faults: AtomicU64,
    last_fault: Mutex<Option<String>>,
}

impl ScriptFactory {
    pub(crate) fn new(
        name: &str,
        source: &str,
        ast: AST,
        parameters: Vec<Parameter>,
        fallback: Fallback,
        limits: Arc<Limits>,
        pool: Arc<Pool>,
    ) -> Self {
        Self(Arc::new(Loaded {
            name: name.into(),
            source: source.to_owned(),
            moves_kv: calls(&ast, "prep_recv"),
            ast: Arc::new(ast),
            parameters,
            fallback,
            limits,
            pool,
            runs: AtomicU64::new(0),
            faults: AtomicU64::new(0),
            last_fault: Mutex::default(),
        }))
    }
}

impl ProgramFactory for ScriptFactory {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn parameters(&self) -> &[Parameter] {
        &self.0.parameters
    }

    fn about(&self) -> &str {
        "A script."
    }

    fn build(&self, parameters: &Parameters) -> Result<Arc<dyn Program>, BadPattern> {
        Ok(Arc::new(ScriptProgram { script: self.0.clone(), parameters: parameters.clone() }))
    }
}

impl Script for ScriptFactory {
    fn source(&self) -> &str {
        &self.0.source
    }

    fn fallback(&self) -> &str {
        self.0.fallback.pattern()
    }

    fn counts(&self) -> ScriptCounts {
        ScriptCounts {
            runs: self.0.runs.load(Ordering::Relaxed),
            faults: self.0.faults.load(Ordering::Relaxed),
            last_fault: self.0.last_fault.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}

/// A script with the values of its parameters.
#[derive(Clone, Debug)]
pub struct ScriptProgram {
    script: Arc<Loaded>,
    parameters: Parameters,
}

#[async_trait]
impl Program for ScriptProgram {
    fn name(&self) -> &str {
        &self.script.name
    }

    fn moves_kv(&self) -> bool {
        self.script.moves_kv
    }

    fn label(&self, pattern: &str) -> String {
        format!("script:{pattern}")
    }

    fn fallback(&self) -> Option<&Fallback> {
        Some(&self.script.fallback)
    }

    fn passes_on(&self) -> bool {
        true
    }

    async fn serve(&self, ctx: &Ctx, request: &Request) -> Result<TokenStream, Error> {
        let script = &*self.script;
        script.runs.fetch_add(1, Ordering::Relaxed);
        match self.run(ctx, request).await {
            Ok(stream) => Ok(stream),
            Err(Failure::Call(error)) => Err(error),
            Err(Failure::Fault(fault)) => {
                script.faults.fetch_add(1, Ordering::Relaxed);
                let told = fault.to_string();
                let request_id = ctx.call_context().request_id.as_deref();
                warn!(script = &*script.name, request_id, fault.kind, "{told}");
                *script.last_fault.lock().unwrap_or_else(PoisonError::into_inner) = Some(told.clone());
                Err(Error::Program { program: script.name.to_string(), reason: fault.kind, message: told })
            }
        }
    }
}

impl ScriptProgram {
    async fn run(&self, ctx: &Ctx, request: &Request) -> Result<TokenStream, Failure> {
        let script = &*self.script;
        let Some(permit) = script.pool.admit(script.limits.queue_time).await else {
            let most = script.limits.concurrent_runs;
            return Err(Failure::Fault(Fault::new("busy", format!("{most} scripts are running"))));
        };
        let (run, mut inbox) = Run::new(
            script.name.clone(),
            ctx.clone(),
            request.clone(),
            self.parameters.clone(),
            script.limits.clone(),
        );
        // From here on, whatever way this ends: the seats go, and so does the script.
        let over = EndOnDrop(run);
        let (done, mut ended) = oneshot::channel();
        let (ast, on_thread) = (script.ast.clone(), over.0.clone());
        let job = move || drop(done.send(evaluate(&ast, &on_thread)));
        script
            .pool
            .run(permit, job)
            .map_err(|error| Failure::Fault(Fault::new("busy", format!("there is no thread: {error}"))))?;

        let mut stream = None;
        let outcome = loop {
            tokio::select! {
                biased;
                Some(command) = inbox.recv() => over.0.perform(command, &mut stream).await,
                outcome = &mut ended => break outcome,
            }
        };
        match outcome {
            Ok(Ok(())) => stream.ok_or_else(|| {
                Failure::Fault(Fault::new("no_answer", "the script ended without start_generate"))
            }),
            Ok(Err(failure)) => Err(failure),
            Err(_) => Err(Failure::Fault(Fault::new("panic", "the script's thread ended"))),
        }
    }
}

impl Run {
    /// Makes the call that the script waits for. When this is dropped, so is the seat, and the script's wait ends.
    async fn perform(&self, command: Command, stream: &mut Option<TokenStream>) {
        let Command { seat: at, call, reply } = command;
        // One that is gone was checked for by the script's side; its wait ends with the reply.
        let Some(mut seat) = self.take_seat(at) else { return };
        let request = &self.request;
        let answer = match call {
            Call::PrepRecv { end } => {
                let answer = seat.prep_recv(request, end).await;
                self.put_seat(at, seat);
                answer.map(Answer::Prepared)
            }
            Call::RemoteSend { receiver, begin, end } => {
                let answer = seat.remote_send(request, &receiver, begin, end).await;
                self.put_seat(at, seat);
                answer.map(Answer::Sent)
            }
            Call::StartGenerate { begin } => {
                // The other seats have done their part, and should not count as load while this one decodes.
                self.give_up_seats();
                seat.start_generate(request, begin).await.map(|chunks| {
                    *stream = Some(chunks);
                    Answer::Started
                })
            }
        };
        // The script waits for it, unless its thread has died.
        let _ = reply.send(answer);
    }
}

/// Says whether a method is called anywhere in a script.
fn calls(ast: &AST, method: &str) -> bool {
    // The walk ends early where it is found.
    !ast.walk(&mut |path| {
        !matches!(path.last(), Some(ASTNode::Expr(Expr::MethodCall(call, _))) if call.name == method)
    })
}

/// Ends a run when its request is over, in whatever way.
struct EndOnDrop(Arc<Run>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.end();
    }
}

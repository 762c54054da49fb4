//! Scripts over engines that only keep count: what they call, what is refused before they run, and what ends them when they do.

use std::time::Duration;

use microserving_router::{BadScript, Pattern, Patterns};
use microserving_script::{Limits, ScriptFactory, ScriptLoader, Trace, dry_run};
use serde_json::Value;

const PREFILL_DECODE: &str = r"
let d = ctx.decoder();
let p = ctx.prefiller(d);
if p == () { return d.start_generate(0); }
let end = req.len - 1;
let r = d.prep_recv(end);
if r.matched < end { p.remote_send(r, r.matched, end); }
d.start_generate(end)
";

fn limits() -> Limits {
    // Time is not what these tests are about, and machines are slow at times.
    Limits { compute_time: Duration::from_secs(30), ..Limits::default() }
}

fn compile_within(limits: Limits, source: &str) -> Result<ScriptFactory, BadScript> {
    let patterns = Patterns::new(&Pattern::named("data_parallel"), vec![]).expect("it is built in");
    ScriptLoader::new(limits).compile("test", source, &patterns)
}

fn compile(source: &str) -> ScriptFactory {
    compile_within(limits(), source).expect("a good script")
}

async fn play(source: &str, trace: &str) -> Vec<Value> {
    let report = dry_run(compile(source), Trace::parse(trace.as_bytes()).expect("a trace")).await;
    let report = report.expect("a report");
    report["requests"].as_array().expect("a list").clone()
}

/// Writes the calls of a request as `a.prep_recv[40] …`.
fn calls(request: &Value) -> String {
    let number = |row: &Value, key: &str| row[key].as_u64().map(|value| value.to_string());
    let shown = request["calls"].as_array().expect("a list").iter().map(|row| {
        let text = |key: &str| row[key].as_str().unwrap_or_default();
        let range = match text("call") {
            "prep_recv" => number(row, "end"),
            "remote_send" => number(row, "begin").zip(number(row, "end")).map(|(a, b)| format!("{a},{b}")),
            "start_generate" => number(row, "begin"),
            _ => None,
        };
        format!("{}.{}[{}]", text("engine"), text("call"), range.unwrap_or_default())
    });
    shown.collect::<Vec<_>>().join(" ")
}

const TWO: &str = "{\"engine\": \"a\", \"role\": \"prefill\"}\n{\"engine\": \"b\", \"role\": \"decode\"}\n";

#[tokio::test]
async fn a_script_makes_the_calls_that_it_says() {
    let requests =
        play(PREFILL_DECODE, &format!("{TWO}{{\"len\": 1}}\n{{\"len\": 40}}\n{{\"len\": 40}}")).await;
    let shown: Vec<String> = requests.iter().map(calls).collect();
    assert_eq!(
        shown,
        [
            // Nothing lies before the last token of one.
            "b.prep_recv[0] b.start_generate[0]",
            "b.prep_recv[39] a.remote_send[0,39] b.start_generate[39]",
            "b.prep_recv[39] a.remote_send[32,39] b.start_generate[39]",
        ]
    );
    for request in &requests {
        assert_eq!(
            (&request["status"], &request["pattern"]),
            (&200.into(), &"script:test".into()),
            "{request}"
        );
    }
}

#[tokio::test]
async fn it_sees_the_request_and_the_engines() {
    let source = r#"
        if req.tenant == "acme" || req.header("x-team") == "red" || req.priority > 3 {
            return ctx.seat(ctx.engines().max_by(|e| e.load)).start_generate(0);
        }
        let engines = ctx.engines().filter(|e| e.role != "prefill" && e.queued_tokens < 100);
        let e = engines[hash(req.prefix(4)) % engines.len];
        if req.tokens.len != req.len || req.tokens[0] != req.prefix(1)[0] || hash(req.tokens[0..4]) != hash(req.prefix(4)) {
            throw "tokens differ";
        }
        ctx.log(`${e.name} ${e.number} ${e.held} ${e.health} ${e.free_pages} ${req.model} ${req.max_tokens} ${ctx.attempt}`);
        ctx.seat(e).start_generate(0)
    "#;
    let trace = r#"{"engine": "busy", "load": 7}
        {"engine": "full", "queued_tokens": 500}
        {"engine": "idle"}
        {"len": 40, "tenant": "acme"}
        {"len": 40, "headers": {"x-team": "red"}}
        {"len": 40, "priority": 4}
        {"len": 40, "topic": 1}
        {"len": 99, "topic": 1, "model": "m"}"#;
    let requests = play(source, trace).await;
    let shown: Vec<String> = requests.iter().map(calls).collect();
    assert_eq!(shown[..3], ["busy.start_generate[0]"; 3], "{requests:#?}");
    assert!(["busy.start_generate[0]", "idle.start_generate[0]"].contains(&shown[3].as_str()), "{shown:?}");
    assert_eq!(shown[3], shown[4], "one beginning goes to one engine");
}

#[tokio::test]
async fn what_an_engine_holds_is_seen() {
    let source = r"
        let best = ctx.engines().max_by(|e| e.held);
        if best.held > 0 { return ctx.seat(best).start_generate(0); }
        ctx.seat(ctx.engines().sorted_by(|e| e.name)[1]).start_generate(0)
    ";
    let trace = "{\"engine\": \"a\"}\n{\"engine\": \"b\"}\n{\"len\": 64}\n{\"len\": 80}\n";
    let requests = play(source, trace).await;
    assert_eq!(requests.iter().map(calls).collect::<Vec<_>>(), ["b.start_generate[0]"; 2]);
    assert_eq!(requests[1]["calls"][0]["cached"], 64);
}

#[tokio::test]
async fn a_failed_call_can_be_caught_and_else_is_another_attempt() {
    let full = "{\"engine\": \"a\", \"full\": true}\n{\"engine\": \"b\", \"full\": true}\n{\"len\": 40}\n";
    let caught = r#"
        let d = ctx.decoder();
        try { d.prep_recv(-1); } catch (e) {
            if e.status != 503 || e.during != "prep_recv" || e.reason != "refused" { throw e; }
        }
        ctx.seat(d.engine).start_generate(0)
    "#;
    let request = play(caught, full).await.remove(0);
    assert_eq!((&request["pattern"], &request["status"]), (&"script:test".into(), &200.into()), "{request}");
    assert_eq!(request["calls"].as_array().map(Vec::len), Some(2), "{request}");
    // The second attempt gets no prefiller, as a Rust program would not.
    let request = play(PREFILL_DECODE, full).await.remove(0);
    assert_eq!((&request["pattern"], &request["status"]), (&"script:test".into(), &200.into()), "{request}");
    assert_eq!(request.get("fault"), None);
}

#[tokio::test]
async fn parameters_are_found_in_the_source() {
    use microserving_router::ProgramFactory;
    let script = compile(
        r#"let n = ctx.param("threshold", 512); let s = ctx.param("share", 0.5); let w = ctx.param("who", "me");
        let on = ctx.param("on", true);
        if n == 512 && s == 0.5 && w == "me" && on { return ctx.decoder().start_generate(0); } throw "no defaults";"#,
    );
    let names: Vec<_> = script.parameters().iter().map(|parameter| parameter.name.to_string()).collect();
    assert_eq!(names, ["threshold", "share", "who", "on"]);
    let report = dry_run(script, Trace::small()).await.expect("a report");
    assert_eq!(report["faults"], 0, "{report}");
}

#[test]
fn what_is_wrong_is_said_before_it_runs() {
    let mut others = Vec::new();
    for (source, expected) in [
        ("let d = ctx.decoder(;", "line 1, column 21: Unexpected ';'"),
        ("let d = ctx.decoder();\n  d.start_generate(start)", "line 2, column 20: Undefined variable: start"),
        ("ctx.decodr()", "line 1, column 5: ctx has no method \"decodr\""),
        ("let d = ctx.decoder();\nd.prep_recv()", "line 2, column 3: prep_recv takes 1 argument(s), 0 given"),
        ("ctx.prefiller()", "line 1, column 5: ctx.prefiller takes 1 argument(s), 0 given"),
        ("ctx.prep_recv(4)", "line 1, column 5: ctx has no method \"prep_recv\""),
        ("let n = req.length;", "line 1, column 13: req has no property \"length\""),
        ("let n = req.load;", "line 1, column 13: req has no property \"load\""),
        ("ctx.log(req.header())", "line 1, column 13: req.header takes 1 argument(s), 0 given"),
        ("let e = ctx.engines()[0]; let n = e.weigth;", "line 1, column 37: there is no property \"weigth\""),
        ("nothing(3)", "line 1, column 1: there is no function \"nothing\""),
        ("sleep(3)", "line 1, column 1: there is no function \"sleep\""),
        ("fn f(a) { a } f(1, 2)", "line 1, column 15: f takes 1 argument(s), 2 given"),
        ("eval(\"1\")", "line 1, column 1: "),
        ("import \"x\" as x;", "line 1, column 1: "),
        (
            "let f = |x| x; ctx.decoder().start_generate(0)",
            "line 1, column 9: a closure must stand as an argument of",
        ),
        ("let x = [1]; let f = || x; 1", "line 1, column 22: a closure must stand as an argument of"),
        ("ctx.engines().sort(|a, b| a.load - b.load)", "line 1, column 15: sort takes no closure here"),
        ("let a = [1];\n  a[0] = 2;", "line 2, column 3: only whole variables are assigned to"),
        ("let m = #{};\n  m.k += 2;", "line 2, column 3: only whole variables are assigned to"),
        ("const FALLBACK = \"nope\"; 1", "line 1, column 18: FALLBACK: pattern \"nope\" does not exist"),
        ("const FALLBACK = 1; 1", "line 1, column 18: FALLBACK must be a text"),
        ("let n = \"a\"; ctx.param(n, 1)", "line 1, column 18: param takes a name and a default"),
    ] {
        let error = compile_within(limits(), source).expect_err(source).to_string();
        if !error.starts_with(expected) {
            others.push(format!("{source}\n  {error}\n  {expected}"));
        }
    }
    assert!(others.is_empty(), "{}", others.join("\n"));
    let long = "1;".repeat(40_000);
    assert!(compile_within(limits(), &long).expect_err("long").to_string().contains("bytes"));
}

#[test]
fn a_fallback_may_have_parameters() {
    use microserving_router::Script;
    let script = compile("const FALLBACK = \"balanced:0.25\"; ctx.decoder().start_generate(0)");
    assert_eq!(script.fallback(), "balanced:0.25");
    assert_eq!(compile("1").fallback(), "data_parallel");
}

/// Runs a script that goes over a bound and returns what the client is told served it, and the fault.
async fn bound(limits: Limits, source: &str) -> (String, String) {
    let script = compile_within(limits, source).expect("it is well formed");
    let trace = Trace::parse(b"{\"engine\": \"a\"}\n{\"engine\": \"b\"}\n{\"len\": 40}").expect("a trace");
    let report = dry_run(script, trace).await.expect("a report");
    let request = &report["requests"][0];
    assert_eq!(request["status"], 200, "the fallback serves it: {report}");
    let last =
        request["calls"].as_array().and_then(|calls| calls.iter().rev().find(|row| row["call"] != "abort"));
    assert_eq!(last.map(|row| &row["call"]), Some(&"start_generate".into()), "{report}");
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    (text(&request["pattern"]), text(&request["fault"]))
}

#[tokio::test]
async fn every_bound_ends_the_script_and_the_fallback_serves() {
    let mut others = Vec::new();
    for (source, reason, fault) in [
        ("loop {}", "operations", "line 1, column"),
        ("let i = 0;\nwhile true { i += 1; }", "operations", "line 2, column"),
        ("for i in 0..1000000000 { }", "operations", "line 1, column"),
        // Each closure counts from where the others left off.
        (
            "let a = []; a.pad(4000, 0); for i in 0..1000 { a.for_each(|x| { let y = 1; }); }",
            "operations",
            "",
        ),
        ("try { loop {} } catch { }\nctx.decoder().start_generate(0)", "operations", "line 1, column"),
        ("fn f(x) { f(x + 1) }\nf(0)", "depth", "line "),
        ("fn f(x) { [x].map(|y| f(y)) } f(0)", "depth", ""),
        ("let a = [1]; loop { a += a; }", "memory", "line 1, column"),
        ("let a = [1]; loop { a.append(a); }", "memory", "line 1, column"),
        ("let a = []; loop { a = [a, a]; }", "memory", "line 1, column"),
        ("let s = \"x\"; loop { s += s; }", "memory", "line 1, column"),
        ("let s = \"x\"; s.pad(1000000000, '-'); s", "memory", ""),
        ("let a = []; a.pad(1000000000, 0); a", "memory", ""),
        ("let m = #{}; for i in 0..100000 { m.set(`k${i}`, i); }", "memory", "line 1, column"),
        ("loop { ctx.decoder(); }", "seats", "line 1, column"),
        (
            "let d = ctx.decoder();\nd.prep_recv(9); d.start_generate(9)",
            "runtime",
            "line 2, column 19: [0, 9) was prepared",
        ),
        (
            "let d = ctx.decoder();\nd.prep_recv(0); d.start_generate(9)",
            "runtime",
            "line 2, column 19: begin is 9, must be 0",
        ),
        ("ctx.decoder().start_generate(40)", "runtime", "line 1, column 15: begin is 40"),
        ("ctx.decoder().prep_recv(-41)", "runtime", "line 1, column 15: end is -41"),
        (
            "let d = ctx.decoder(); let p = ctx.prefiller(d); let r = d.prep_recv(9);\np.remote_send(r, 0, 10)",
            "runtime",
            "line 2, column 3: [0, 10) is not within [0, 9)",
        ),
        (
            "let d = ctx.decoder(); d.start_generate(0); d.start_generate(0)",
            "runtime",
            "line 1, column 47: the seat is given up",
        ),
        ("throw \"nothing fits\";", "runtime", "line 1, column 1: nothing fits"),
        ("let x = [1]; x[7]", "runtime", "line 1, column 16: "),
        ("ctx.engines().sorted_by(|e| [e])", "runtime", "line 1, column 15: the closure must return"),
        ("ctx.decoder()", "no_answer", "the script ended without start_generate"),
    ] {
        let (pattern, told) = bound(limits(), source).await;
        let wanted = format!("data_parallel; fallback of script:test: {reason}");
        if pattern != wanted || !told.starts_with(fault) {
            others.push(format!("{source}\n  {pattern} {told}\n  {wanted} {fault}"));
        }
    }
    assert!(others.is_empty(), "{}", others.join("\n"));
}

#[tokio::test]
async fn time_and_calls_are_bounded() {
    let short = Limits { compute_time: Duration::from_millis(1), operations: u64::MAX, ..Limits::default() };
    let (pattern, fault) = bound(short, "loop {}").await;
    assert_eq!(pattern, "data_parallel; fallback of script:test: time", "{fault}");
    let few = Limits { engine_calls: 2, ..limits() };
    let calls = "loop { let d = ctx.decoder(); d.prep_recv(0); }";
    let (pattern, fault) = bound(few, calls).await;
    assert_eq!(pattern, "data_parallel; fallback of script:test: calls", "{fault}");
}

#[tokio::test]
async fn the_deepest_script_does_not_run_out_of_stack() {
    // As deep as the parser lets an expression be, in functions within closures within functions.
    let nested = |depth: usize| {
        format!("fn f(x) {{ [x].map(|y| {}f(y){}) }} f(0)", "(1 + ".repeat(depth), ")".repeat(depth))
    };
    let fits = |source: &String| compile_within(limits(), source).is_ok();
    let source = (1..100).map(nested).take_while(fits).last().expect("some depth is allowed");
    assert!(source.len() > nested(4).len(), "{source}");
    let (pattern, fault) = bound(limits(), &source).await;
    assert_eq!(pattern, "data_parallel; fallback of script:test: depth", "{fault}");
}

#[test]
fn traces_are_checked() {
    for (trace, expected) in [
        ("", "0 engines"),
        ("{\"engine\": \"a\"}", "0 requests"),
        ("{\"engine\": \"a\"}\nnonsense", "line 2: "),
        ("{\"engine\": \"a\", \"role\": \"boss\"}\n{\"len\": 1}", "line 1: role is \"boss\""),
        ("{\"engine\": \"a\"}\n{\"engine\": \"a\"}\n{\"len\": 1}", "line 2: the engine \"a\" is there twice"),
        ("{\"engine\": \"a\"}\n{\"length\": 1}", "line 2: unknown field `length`"),
        ("{\"engine\": \"a\"}\n{\"len\": 0}", "line 2: the prompt has no tokens"),
        ("{\"engine\": \"a\"}\n{}", "line 2: either tokens or len"),
        (
            "{\"engines\": [{\"engine\": \"a\"}], \"requests\": [{\"len\": 99999999}]}",
            "requests[0]: len must be",
        ),
        ("{\"engines\": {}, \"requests\": []}", "engines must be a list"),
        ("{\"engines\": [], \"requests\": [], \"more\": 1}", "more is no field"),
    ] {
        let error = Trace::parse(trace.as_bytes()).expect_err(trace);
        assert_eq!((error.status, error.param.as_deref()), (400, Some("trace")));
        assert!(error.message.starts_with(expected), "{trace}\n  {}", error.message);
    }
}

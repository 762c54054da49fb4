//! Scripts over real processes: the work of the Rust programs, swapped under load, and nothing left behind whatever they do.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use microserving_harness::http::{self, Answer};
use microserving_harness::{Cluster, ClusterOptions};
use microserving_tests::{Case, PAGE_SIZE, Work, documented, prompt};
use serde_json::{Value, json};

const IDLE: Duration = Duration::from_secs(10);

fn cluster(num_engines: usize) -> Result<Cluster> {
    Cluster::start(&ClusterOptions::toy(num_engines).engine_args([
        "--transport",
        "shm",
        "--num-pages",
        "2048",
        "--lease-seconds",
        "2",
    ]))
}

fn scripts(cluster: &Cluster, rest: &str) -> String {
    format!("{}/admin/v1/scripts{rest}", cluster.router().url())
}

/// Loads a script as `curl --data-binary` would.
fn load(cluster: &Cluster, name: &str, source: &str) -> Result<Answer> {
    http::put_bytes(&scripts(cluster, &format!("/{name}")), &[], source.as_bytes())
}

fn loaded(cluster: &Cluster, name: &str, source: &str) -> Result<Value> {
    load(cluster, name, source)?.json().with_context(|| format!("loading {name}"))
}

fn complete(cluster: &Cluster, pattern: &str, body: &Value) -> Result<Answer> {
    let headers = [("x-microserving-pattern", pattern), ("x-microserving-stats", "1")];
    http::post(&format!("{}/v1/completions", cluster.router().url()), &headers, body)
}

#[test]
fn scripts_do_the_work_of_the_rust_programs() -> Result<()> {
    let mut cluster = cluster(2)?;
    for (name, documented_as) in [("dp", "data_parallel"), ("pd", "prefill_decode"), ("bal", "balanced")] {
        loaded(&cluster, name, documented(documented_as))?;
    }
    let router = cluster.router().url().to_owned();
    let mut seed = 0;
    for (rust, script) in [
        ("data_parallel", "dp"),
        ("prefill_decode", "pd"),
        ("balanced:0.1", "bal"),
        ("balanced:0.25", "bal:0.25"),
        ("balanced:0.5", "bal:ratio=0.5"),
    ] {
        for num_tokens in [1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 1000] {
            for temperature in [0.0, 0.8] {
                seed += 1;
                let case = |salt: &str| Case {
                    prompt: prompt(num_tokens, seed),
                    max_tokens: 12,
                    temperature,
                    seed: 4242,
                    salt: format!("{salt}-{seed}"),
                };
                let by_rust = case("rust").send(&router, Some(rust))?;
                let by_script = case("script").send(&router, Some(script))?;
                let cell = format!("{script} of {num_tokens} tokens at {temperature}");
                ensure!(by_script.token_ids == by_rust.token_ids, "{cell}: other tokens");
                ensure!(by_script.text == by_rust.text, "{cell}: another text");
                let (work, expected) = (Work::of(&by_script)?, Work::of(&by_rust)?);
                ensure!(work == expected && work == Work::cold(rust, num_tokens), "{cell}: {work:?}");
                let pattern = by_script.stats["pattern"].as_str().unwrap_or_default();
                ensure!(
                    pattern.starts_with(&format!("script:{}", &script[..2])),
                    "{cell}: served by {pattern}"
                );
            }
        }
    }
    // The second turn: what D holds is neither computed nor sent again.
    let turn = |pattern: &str, salt: &str, tokens: Vec<u32>| {
        let salt = salt.to_owned();
        Case { prompt: tokens, max_tokens: 20, temperature: 0.0, seed: 1, salt }.send(&router, Some(pattern))
    };
    let mut works = Vec::new();
    for (pattern, salt) in [("prefill_decode", "turns-rust"), ("pd", "turns-script")] {
        let mut history = prompt(83, 77);
        history.extend(turn(pattern, salt, history.clone())?.token_ids);
        history.extend(prompt(37, 78));
        let second = turn(pattern, salt, history)?;
        works.push((Work::of(&second)?, second.token_ids));
    }
    ensure!(works[0] == works[1] && works[0].0.matched > 0, "{works:?}");
    for name in ["dp", "pd", "bal"] {
        let shown: Value = http::get(&scripts(&cluster, &format!("/{name}")))?.json()?;
        ensure!(shown["faults"] == 0 && shown["runs"].as_u64() > Some(0), "{shown}");
    }
    cluster.wait_idle(IDLE)
}

#[test]
fn a_documented_script_changes_where_requests_go() -> Result<()> {
    let mut cluster = cluster(2)?;
    let source = documented("sticky");
    ensure!(source.lines().count() <= 10, "{source}");
    let where_to = |seed: u32, tail: u32| -> Result<(String, String)> {
        let mut tokens = prompt(80, seed);
        tokens.push(tail);
        let body = json!({"prompt": tokens, "max_tokens": 2, "temperature": 0, "cache_salt": format!("{seed}-{tail}")});
        let headers = [("x-microserving-stats", "1")];
        let answer = http::post(&format!("{}/v1/completions", cluster.router().url()), &headers, &body)?;
        let pattern = answer.header("x-microserving-pattern").unwrap_or_default().to_owned();
        let value: Value = answer.json()?;
        let engine = value.pointer("/microserving/decode_engine").and_then(Value::as_str);
        Ok((pattern, engine.context("no decode_engine")?.to_owned()))
    };
    // Placement of its own takes turns between two idle engines that hold nothing of the prompt.
    let mut before = Vec::new();
    for tail in 97..101 {
        let (pattern, engine) = where_to(5, tail)?;
        ensure!(pattern == "data_parallel", "{pattern}");
        before.push(engine);
    }
    ensure!(before.iter().any(|engine| *engine != before[0]), "{before:?}");
    // The script sends one beginning to one engine, and others elsewhere.
    loaded(&cluster, "sticky", source)?;
    let changed =
        http::put(&format!("{}/admin/v1/pattern", cluster.router().url()), &json!({"name": "sticky"}))?;
    ensure!(changed.status == 200, "{changed:?}");
    let mut engines = std::collections::BTreeSet::new();
    for seed in 0..8 {
        let (pattern, first) = where_to(seed, 110)?;
        ensure!(pattern == "script:sticky", "{pattern}");
        for tail in 111..114 {
            ensure!(where_to(seed, tail)?.1 == first, "one beginning went to two engines");
        }
        engines.insert(first);
    }
    ensure!(engines.len() == 2, "eight beginnings went to {engines:?} only");
    // While it is the default, it cannot be taken away.
    let refused = http::delete(&scripts(&cluster, "/sticky"))?;
    ensure!(refused.status == 409, "{refused:?}");
    http::put(&format!("{}/admin/v1/pattern", cluster.router().url()), &json!({"name": "data_parallel"}))?;
    let gone = http::delete(&scripts(&cluster, "/sticky"))?;
    ensure!(gone.status == 200, "{gone:?}");
    ensure!(http::get(&scripts(&cluster, "/sticky"))?.status == 404, "it is still there");
    ensure!(complete(&cluster, "sticky", &json!({"prompt": [1]}))?.status == 400, "it still serves");
    cluster.wait_idle(IDLE)
}

#[test]
fn every_documented_script_serves() -> Result<()> {
    let mut cluster = cluster(3)?;
    for name in ["data_parallel", "prefill_decode", "by_length", "balanced", "by_tenant", "sticky", "soonest"]
    {
        let script = format!("my_{name}");
        loaded(&cluster, &script, documented(name))?;
        for num_tokens in [1, 700] {
            let body = json!({"prompt": prompt(num_tokens, 3), "max_tokens": 3, "cache_salt": name});
            let answer = complete(&cluster, &script, &body)?;
            let pattern = answer.header("x-microserving-pattern").unwrap_or_default();
            ensure!(
                answer.status == 200 && pattern.starts_with(&format!("script:{script}")),
                "{name}: {answer:?}"
            );
        }
        let shown: Value = http::get(&scripts(&cluster, &format!("/{script}")))?.json()?;
        ensure!(shown["faults"] == 0, "{shown}");
    }
    cluster.wait_idle(IDLE)
}

#[test]
fn broken_scripts_are_refused_and_nothing_changes() -> Result<()> {
    let cluster = cluster(2)?;
    loaded(&cluster, "mine", documented("data_parallel"))?;
    for (source, line, column) in [
        ("let d = ctx.decoder();\nd.start_generate(strat)", 2, 18),
        ("let d = ctx.decoder();\n  d.start_generat(0)", 2, 5),
        ("let x = (1;", 1, 11),
    ] {
        let answer = load(&cluster, "mine", source)?;
        let body: Value = serde_json::from_str(&answer.body)?;
        let place = (&body["error"]["line"], &body["error"]["column"]);
        ensure!(answer.status == 400 && place == (&json!(line), &json!(column)), "{source}: {answer:?}");
        let message = body["error"]["message"].as_str().unwrap_or_default();
        ensure!(message.starts_with(&format!("line {line}, column {column}: ")), "{message}");
    }
    let shown: Value = http::get(&scripts(&cluster, "/mine"))?.json()?;
    ensure!(shown["revision"] == 1 && shown["source"] == documented("data_parallel"), "{shown}");
    ensure!(load(&cluster, "prefill_decode", "1")?.status == 409, "a pattern of our own was replaced");
    ensure!(load(&cluster, "no%20name", "1")?.status == 400, "a name that no header can carry");
    ensure!(http::get(&scripts(&cluster, "/nobody"))?.status == 404, "nobody is there");
    let rolled = http::post_bytes(&scripts(&cluster, "/mine/rollback"), &[], b"")?;
    ensure!(rolled.status == 409, "there is nothing before revision 1: {rolled:?}");
    let bad = http::put_bytes(&scripts(&cluster, "/mine?dry=1"), &[], b"1")?;
    ensure!(bad.status == 400, "an unknown option was taken: {bad:?}");

    // A dry run changes nothing either, and calls no engine.
    let tried = http::put_bytes(
        &scripts(&cluster, "/new?dry_run=true"),
        &[],
        documented("prefill_decode").as_bytes(),
    )?;
    let report: Value = tried.json()?;
    ensure!(report["faults"] == 0 && report["requests"].as_array().map(Vec::len) == Some(5), "{report}");
    ensure!(http::get(&scripts(&cluster, "/new"))?.status == 404, "a dry run loaded it");
    let trace = "{\"engine\": \"a\"}\n{\"engine\": \"b\"}\n{\"len\": 50}\n";
    let report: Value =
        http::post_bytes(&scripts(&cluster, "/mine/dry_run"), &[], trace.as_bytes())?.json()?;
    let call = report.pointer("/requests/0/calls/0").context("no call")?;
    ensure!(
        call["call"] == "start_generate" && report["requests"][0]["pattern"] == "script:mine",
        "{report}"
    );
    let broken = http::post_bytes(&scripts(&cluster, "/mine/dry_run"), &[], b"nonsense")?;
    ensure!(broken.status == 400, "{broken:?}");
    for index in 0..2 {
        let state = cluster.engine_state(index)?;
        ensure!(state["counters"]["prefill_tokens"] == 0, "an engine worked: {state}");
    }
    Ok(())
}

#[test]
fn every_change_of_a_script_has_a_revision_and_a_row_of_the_audit() -> Result<()> {
    let cluster = cluster(1)?;
    let admin = format!("{}/admin/v1", cluster.router().url());
    let audit = || http::get(&format!("{admin}/audit"))?.json::<Value>();
    let source = documented("data_parallel");
    let first = load(&cluster, "mine", source)?;
    ensure!(first.header("etag") == Some("\"2\""), "{first:?}");
    loaded(&cluster, "mine", documented("sticky"))?;
    let rolled = http::post_bytes(&scripts(&cluster, "/mine/rollback"), &[], b"")?;
    ensure!(rolled.status == 200 && rolled.header("etag") == Some("\"4\""), "{rolled:?}");
    ensure!(http::delete(&scripts(&cluster, "/mine"))?.status == 200, "it is not in use");

    let rows = audit()?;
    ensure!(rows["revision"] == 5, "{rows}");
    let wanted = [
        (5, "remove script mine", json!({"script": "mine", "script_revision": 1}), json!({"script": null})),
        (
            4,
            "roll back script mine",
            json!({"script": "mine", "script_revision": 2}),
            json!({"script": "mine", "script_revision": 1}),
        ),
        (
            3,
            "load script mine",
            json!({"script": "mine", "script_revision": 1}),
            json!({"script": "mine", "script_revision": 2}),
        ),
        (2, "load script mine", json!({"script": null}), json!({"script": "mine", "script_revision": 1})),
    ];
    let shown = rows["audit"].as_array().context("no rows")?;
    ensure!(shown.len() == wanted.len(), "{rows}");
    for (row, (revision, what, before, after)) in shown.iter().zip(&wanted) {
        let applied = row["outcome"] == "applied" && row["who"].as_str().is_some_and(|who| !who.is_empty());
        ensure!(applied && row["revision"] == *revision && row["what"] == *what, "{row} is not {what}");
        ensure!(row["before"] == *before && row["after"] == *after, "{row}");
    }

    // What changes nothing is no row: a dry run, a broken script, one that is not there, a change for an older revision.
    let stale = http::put_bytes(&scripts(&cluster, "/mine"), &[("if-match", "\"4\"")], source.as_bytes())?;
    ensure!(stale.status == 412, "{stale:?}");
    ensure!(http::get(&scripts(&cluster, "/mine"))?.status == 404, "it was loaded all the same");
    http::put_bytes(&scripts(&cluster, "/mine?dry_run=true"), &[], source.as_bytes())?;
    ensure!(load(&cluster, "mine", "let x = (1;")?.status == 400, "a broken script");
    ensure!(http::delete(&scripts(&cluster, "/mine"))?.status == 404, "there is none");
    for wrong in ["/mine?dry_run=true", "/mine?force=true"] {
        ensure!(http::delete(&scripts(&cluster, wrong))?.status == 400, "{wrong} was taken");
    }
    ensure!(audit()? == rows, "something was noted");
    Ok(())
}

#[test]
fn swapped_and_rolled_back_under_load() -> Result<()> {
    let mut cluster = cluster(2)?;
    let sources = [documented("data_parallel"), documented("prefill_decode"), documented("balanced")];
    loaded(&cluster, "live", sources[0])?;
    let (stop, served, patterns) =
        (AtomicBool::new(false), AtomicUsize::new(0), std::sync::Mutex::new(Vec::new()));
    let router = cluster.router().url().to_owned();
    let expected: Vec<Vec<u32>> = (0..8_u32)
        .map(|client| {
            let case = Case {
                prompt: prompt(100 + client, client),
                max_tokens: 10,
                temperature: 0.0,
                seed: 0,
                salt: format!("alone-{client}"),
            };
            Ok(case.send(cluster.engines()[0].url(), None)?.token_ids)
        })
        .collect::<Result<_>>()?;
    std::thread::scope(|scope| -> Result<()> {
        let clients: Vec<_> = (0..8_u32)
            .map(|client| {
                let (stop, served, patterns, router) = (&stop, &served, &patterns, &router);
                let expected = &expected[client as usize];
                scope.spawn(move || -> Result<()> {
                    let mut turn = 0;
                    while !stop.load(Ordering::Relaxed) {
                        turn += 1;
                        let case = Case {
                            prompt: prompt(100 + client, client),
                            max_tokens: 10,
                            temperature: 0.0,
                            seed: 0,
                            salt: format!("live-{client}-{turn}"),
                        };
                        let answer = case.send(router, Some("live"))?;
                        ensure!(answer.token_ids == *expected, "client {client}: other tokens");
                        let pattern = answer.stats["pattern"].as_str().unwrap_or_default().to_owned();
                        let sent = answer.stats["sent_tokens"].as_u64().unwrap_or(0);
                        patterns.lock().expect("not poisoned").push((pattern, sent > 0));
                        served.fetch_add(1, Ordering::Relaxed);
                    }
                    Ok(())
                })
            })
            .collect();
        let change = || -> Result<()> {
            for round in 0..12 {
                let seen = served.load(Ordering::Relaxed);
                let until = Instant::now() + Duration::from_secs(30);
                // Each version serves some requests before the next one comes.
                while served.load(Ordering::Relaxed) < seen + 8 && Instant::now() < until {
                    std::thread::sleep(Duration::from_millis(2));
                }
                let answer = if round % 4 == 3 {
                    http::post_bytes(&scripts(&cluster, "/live/rollback"), &[], b"")?
                } else {
                    load(&cluster, "live", sources[(round + 1) % sources.len()])?
                };
                ensure!(answer.status == 200, "{answer:?}");
            }
            Ok(())
        };
        let changed = change();
        stop.store(true, Ordering::Relaxed);
        for client in clients {
            client.join().expect("a client does not panic")?;
        }
        changed
    })?;
    let patterns = patterns.into_inner().expect("not poisoned");
    ensure!(patterns.iter().all(|(pattern, _)| pattern.starts_with("script:live")), "{patterns:?}");
    let disaggregated = patterns.iter().filter(|(_, sent)| *sent).count();
    ensure!(disaggregated > 0 && disaggregated < patterns.len(), "{disaggregated} of {}", patterns.len());
    cluster.wait_idle(IDLE)
}

#[test]
fn scripts_that_run_wild_cost_one_pattern_and_nothing_else() -> Result<()> {
    let mut cluster = cluster(2)?;
    let wild = [
        ("endless", "loop {}"),
        ("bomb", "let a = [1]; loop { a += a; }"),
        ("deep", "fn f(x) { f(x + 1) } f(0)"),
        // With pages reserved on D, and a seat on P.
        ("halfway", "let d = ctx.decoder(); let p = ctx.prefiller(d); let r = d.prep_recv(-1); loop {}"),
        (
            "sent",
            "let d = ctx.decoder(); let p = ctx.prefiller(d); let r = d.prep_recv(-1); p.remote_send(r, r.matched, -1); throw 1;",
        ),
        ("silent", "ctx.decoder();"),
    ];
    let alone = json!({"prompt": prompt(200, 9), "max_tokens": 8, "temperature": 0, "cache_salt": "alone"});
    let expected: Value = complete(&cluster, "data_parallel", &alone)?.json()?;
    let before = cluster.router().resident_bytes()?.0;
    for (name, source) in wild {
        loaded(&cluster, name, source)?;
    }
    std::thread::scope(|scope| -> Result<()> {
        let cluster = &cluster;
        let clients: Vec<_> = wild
            .iter()
            .flat_map(|(name, _)| (0..4).map(move |client| (*name, client)))
            .map(|(name, client)| {
                let mut body = alone.clone();
                body["cache_salt"] = format!("{name}-{client}").into();
                scope.spawn(move || complete(cluster, name, &body).map(|answer| (name, answer)))
            })
            .collect();
        // The router goes on answering meanwhile.
        for _ in 0..20 {
            ensure!(http::status(&format!("{}/health/ready", cluster.router().url()))? == 200, "not ready");
        }
        for client in clients {
            let (name, answer) = client.join().expect("a client does not panic")?;
            let pattern = answer.header("x-microserving-pattern").unwrap_or_default().to_owned();
            ensure!(
                pattern.starts_with(&format!("data_parallel; fallback of script:{name}: ")),
                "{name}: {pattern}"
            );
            let body: Value = answer.json().context(name)?;
            ensure!(body["choices"][0]["text"] == expected["choices"][0]["text"], "{name}: {body}");
            ensure!(body["microserving"]["pattern"] == pattern.as_str(), "{name}: {body}");
        }
        Ok(())
    })?;
    let grown = cluster.router().resident_bytes()?.1.saturating_sub(before);
    ensure!(grown < 256 << 20, "the router grew by {grown} bytes");
    let metrics = http::get(&format!("{}/metrics", cluster.router().url()))?.body;
    ensure!(metrics.contains("program_failures_total{program=\"bomb\",reason=\"memory\"} 4"), "{metrics}");
    let shown: Value = http::get(&scripts(&cluster, "/endless"))?.json()?;
    ensure!(
        shown["faults"] == 4 && shown["last_fault"].as_str().is_some_and(|fault| fault.contains("line 1")),
        "{shown}"
    );
    cluster.wait_idle(IDLE)
}

#[test]
fn a_client_that_goes_away_ends_its_script() -> Result<()> {
    // A slow engine, so that the script is still waiting for its prefill.
    let mut cluster = Cluster::start(&ClusterOptions::toy(2).engine_args([
        "--transport",
        "shm",
        "--num-pages",
        "2048",
        "--toy-step-ms",
        "400",
        "--lease-seconds",
        "20",
    ]))?;
    loaded(&cluster, "pd", documented("prefill_decode"))?;
    let url = format!("{}/v1/completions", cluster.router().url());
    let address = cluster.router().url().trim_start_matches("http://").to_owned();
    let is_reserved = |cluster: &Cluster| {
        (0..2).any(|index| {
            cluster.engine_state(index).is_ok_and(|state| state["pages"]["reserved"].as_u64() > Some(0))
        })
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut seen = 0;
    for seed in 0_u32.. {
        ensure!(Instant::now() < deadline, "of {seed} clients, {seen} were seen with a reservation");
        // Each time another prompt: of one that was sent once, nothing need be reserved.
        let body = json!({"prompt": prompt(900, 40 + seed), "max_tokens": 4, "stream": true}).to_string();
        let mut client = std::net::TcpStream::connect(&address).context(url.clone())?;
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-microserving-pattern: pd\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        std::io::Write::write_all(&mut client, head.as_bytes())?;
        std::io::Write::write_all(&mut client, body.as_bytes())?;
        // Until its reservation is seen on D, or it is so late that its script may have been over time.
        let until = Instant::now() + Duration::from_secs(3);
        while Instant::now() < until && !is_reserved(&cluster) {
            std::thread::sleep(Duration::from_millis(5));
        }
        seen += u32::from(is_reserved(&cluster));
        drop(client);
        // Well before the lease of 20 s ends.
        cluster.wait_idle(IDLE)?;
        if seen == 3 {
            break;
        }
    }
    let engines: Value = http::get(&format!("{}/admin/v1/engines", cluster.router().url()))?.json()?;
    for engine in engines["engines"].as_array().context("no engines")? {
        ensure!(engine["in_flight"] == 0, "a seat is left: {engine}");
    }
    Ok(())
}

#[test]
fn scripts_at_start() -> Result<()> {
    let dir = std::env::temp_dir().join(format!("microserving-scripts-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    let good = dir.join("good.rhai");
    std::fs::write(&good, documented("data_parallel"))?;
    let given = format!("mine={}", good.display());
    let cluster =
        Cluster::start(&ClusterOptions::toy(1).router_args(["--script", &given, "--pattern", "mine"]))?;
    let answer = http::post(
        &format!("{}/v1/completions", cluster.router().url()),
        &[],
        &json!({"prompt": "a", "max_tokens": 1}),
    )?;
    ensure!(answer.header("x-microserving-pattern") == Some("script:mine"), "{answer:?}");
    std::fs::write(&good, "let d = ctx.decoder();\nd.nothing()")?;
    let refused = Cluster::start(&ClusterOptions::toy(1).router_args(["--script", &given]));
    let error = format!("{:#}", refused.err().context("a broken script was taken")?);
    ensure!(error.contains("line 2, column 3"), "{error}");
    std::fs::remove_dir_all(&dir)?;
    Ok(())
}

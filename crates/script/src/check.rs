//! What can be known to be wrong before a script runs.
//!
//! The parser finds bad syntax and variables that are not there. Here are found: functions, methods and properties that nothing has,
//! wrong numbers of arguments, what `ctx` and `req` do not have, and two things by which a script could use memory without bound.
//!
//! # Closures are not kept, and elements are not assigned to
//!
//! The interpreter bounds the size of every value, with two gaps. It does not see what a closure has captured: a chain of closures, each
//! holding the one before, would grow for ever. So a closure may stand only where a function takes it and is done with it. And it
//! does not look at an array or map after an assignment to one of its elements; the methods that do the same are looked at.

use std::any::TypeId;
use std::collections::HashMap;

use microserving_router::{BadScript, Parameter, ParameterKind};
use rhai::{AST, ASTNode, Dynamic, Engine, Expr, FnCallExpr, FnPtr, Position, Stmt};

use crate::handles::{CtxHandle, ReqHandle};
use crate::language::{CTX, REQ};

/// Functions that call a closure and drop it.
const TAKE_CLOSURES: [&str; 16] = [
    "all",
    "drain",
    "filter",
    "find",
    "find_map",
    "for_each",
    "index_of",
    "map",
    "max_by",
    "min_by",
    "reduce",
    "reduce_rev",
    "retain",
    "some",
    "sorted_by",
    "zip",
];
/// Sorting by a comparison that contradicts itself may panic; `sorted_by` takes a key instead.
const COMPARE: [&str; 5] = ["sort", "sort_by", "order", "order_by", "dedup"];
/// What the interpreter itself answers.
const BUILT_IN: [(&str, usize); 5] =
    [("print", 1), ("debug", 1), ("type_of", 1), ("is_shared", 1), ("is_def_var", 1)];
/// The interpreter's name for a closure with what it captured.
const CAPTURE: &str = "curry";
const GETTER: &str = "get$";
const SETTER: &str = "set$";

/// What there is to call.
struct Known {
    /// Numbers of arguments, the receiver of a method included, and the type of the first one.
    functions: HashMap<String, Vec<(usize, Option<TypeId>)>>,
    /// The script's own functions.
    own: Vec<(String, usize)>,
}

/// Checks a script; returns the parameters that it asks for.
pub(crate) fn check(engine: &Engine, ast: &AST) -> Result<Vec<Parameter>, BadScript> {
    let known = Known::new(engine, ast);
    let own = own_keys(ast);
    let mut parameters = Vec::new();
    let mut found = None;
    ast.walk(&mut |path| {
        let judged = known.judge(path, &own, &mut parameters);
        found = judged.err();
        found.is_none()
    });
    match found {
        Some(bad) => Err(bad),
        None => Ok(parameters),
    }
}

impl Known {
    fn new(engine: &Engine, ast: &AST) -> Self {
        let mut functions: HashMap<String, Vec<(usize, Option<TypeId>)>> = HashMap::new();
        let all = engine.collect_fn_metadata(
            None,
            |info| {
                let first = info.metadata.param_types.first().copied();
                Some((info.metadata.name.to_string(), info.metadata.num_params, first))
            },
            true,
        );
        for (name, arguments, first) in all {
            functions.entry(name).or_default().push((arguments, first));
        }
        for (name, arguments) in BUILT_IN {
            functions.entry(name.to_owned()).or_default().push((arguments, None));
        }
        let own =
            ast.iter_functions().map(|function| (function.name.to_owned(), function.params.len())).collect();
        Self { functions, own }
    }

    fn judge(
        &self,
        path: &[ASTNode<'_>],
        own: &[String],
        parameters: &mut Vec<Parameter>,
    ) -> Result<(), BadScript> {
        match path.last() {
            Some(
                ASTNode::Expr(Expr::FnCall(call, position)) | ASTNode::Stmt(Stmt::FnCall(call, position)),
            ) => {
                if call.name == CAPTURE {
                    // The block around it holds the statement that shares the variables.
                    return closure_is_not_kept(path, *position);
                }
                self.call(call, false, *position)
            }
            Some(ASTNode::Expr(Expr::MethodCall(call, position))) => self.call(call, true, *position),
            Some(ASTNode::Stmt(Stmt::Assignment(assignment))) => assigns_to_a_variable(&assignment.1.lhs),
            Some(ASTNode::Expr(Expr::Property(property, position))) => {
                self.property(&property.2, own, *position)
            }
            Some(ASTNode::Expr(Expr::Dot(dot, ..))) => {
                let first = match &dot.rhs {
                    Expr::Dot(chain, ..) | Expr::Index(chain, ..) => &chain.lhs,
                    other => other,
                };
                match &dot.lhs {
                    Expr::Variable(variable, ..) if variable.1 == CTX => {
                        self.member::<CtxHandle>("ctx", first)?;
                        declare(first, parameters)
                    }
                    Expr::Variable(variable, ..) if variable.1 == REQ => {
                        self.member::<ReqHandle>("req", first)
                    }
                    _ => Ok(()),
                }
            }
            Some(ASTNode::Expr(Expr::DynamicConstant(value, position))) if value.is::<FnPtr>() => {
                let captures = path.iter().rev().nth(1).is_some_and(
                    |parent| matches!(parent, ASTNode::Expr(Expr::FnCall(call, _)) if call.name == CAPTURE),
                );
                if captures { Ok(()) } else { closure_is_not_kept(path, *position) }
            }
            _ => Ok(()),
        }
    }

    /// Checks a call as a function, or as a method, whose receiver is not among its arguments.
    fn call(&self, call: &FnCallExpr, is_method: bool, position: Position) -> Result<(), BadScript> {
        if call.is_operator_call() {
            return Ok(());
        }
        let (name, given) = (call.name.as_str(), call.args.len());
        let receiver = usize::from(is_method);
        if COMPARE.contains(&name) && given + receiver == 2 {
            return Err(bad(
                position,
                format!("{name} takes no closure here; sorted_by takes one that returns a key"),
            ));
        }
        let native = self.functions.get(name).into_iter().flatten().map(|(number, _)| *number);
        let native = native.filter_map(|number| number.checked_sub(receiver));
        // Functions of the script have their receiver in `this`.
        let own = self.own.iter().filter(|(own, _)| own == name).map(|(_, number)| *number);
        let takes: Vec<usize> = native.chain(own).collect();
        if takes.contains(&given) {
            return Ok(());
        }
        let message = if takes.is_empty() {
            format!("there is no function {name:?}{}", self.nearest(name))
        } else {
            format!("{name} takes {}, {given} given", numbers(takes))
        };
        Err(bad(position, message))
    }

    fn property(&self, name: &str, own: &[String], position: Position) -> Result<(), BadScript> {
        let known = [GETTER, SETTER].iter().any(|kind| self.functions.contains_key(&format!("{kind}{name}")));
        if known || own.iter().any(|key| key == name) {
            return Ok(());
        }
        Err(bad(position, format!("there is no property {name:?}")))
    }

    /// Checks what stands behind `ctx.` or `req.`, whose types are known.
    fn member<T: 'static>(&self, receiver: &str, member: &Expr) -> Result<(), BadScript> {
        let (name, arguments, position, shown) = match member {
            Expr::Property(property, position) => (
                format!("{GETTER}{}", property.2),
                1,
                *position,
                format!("property {:?}", property.2.as_str()),
            ),
            Expr::MethodCall(call, position) => (
                call.name.to_string(),
                call.args.len() + 1,
                *position,
                format!("method {:?}", call.name.as_str()),
            ),
            _ => return Ok(()),
        };
        let own =
            |(_, first): &&(usize, Option<TypeId>)| *first == Some(TypeId::of::<T>()) || first.is_none();
        let known: Vec<usize> =
            self.functions.get(&name).into_iter().flatten().filter(own).map(|(number, _)| *number).collect();
        if known.is_empty() {
            return Err(bad(position, format!("{receiver} has no {shown}")));
        }
        if known.contains(&arguments) {
            return Ok(());
        }
        let takes = numbers(known.into_iter().map(|number| number - 1).collect());
        Err(bad(position, format!("{receiver}.{name} takes {takes}, {} given", arguments - 1)))
    }

    /// Says which name was probably meant.
    fn nearest(&self, name: &str) -> String {
        let near = self
            .functions
            .keys()
            .filter(|known| !known.contains('$'))
            .min_by_key(|known| distance(known, name));
        match near {
            Some(near) if distance(near, name) <= 2 => format!(", did you mean {near:?}?"),
            _ => String::new(),
        }
    }
}

/// Returns the keys that the script itself gives to maps: those are properties too.
fn own_keys(ast: &AST) -> Vec<String> {
    // What remote_send answers.
    let mut keys = ["sent", "cached", "computed"].map(str::to_owned).to_vec();
    ast.walk(&mut |path| {
        if let Some(ASTNode::Expr(Expr::Map(entries, _))) = path.last() {
            keys.extend(entries.0.iter().map(|(key, _)| key.name.to_string()));
        }
        true
    });
    keys
}

/// Checks that what is assigned to is a whole variable.
fn assigns_to_a_variable(target: &Expr) -> Result<(), BadScript> {
    if matches!(target, Expr::Variable(..)) {
        return Ok(());
    }
    let message = "only whole variables are assigned to; arrays and maps have the method set";
    Err(bad(target.start_position(), message.to_owned()))
}

/// Checks that a closure stands as an argument of a function that drops it.
fn closure_is_not_kept(path: &[ASTNode<'_>], position: Position) -> Result<(), BadScript> {
    let around = path.iter().rev().skip(1).find(|node| {
        !matches!(node, ASTNode::Expr(Expr::Stmt(_)) | ASTNode::Stmt(Stmt::Expr(_) | Stmt::Block(_)))
    });
    let taker = match around {
        Some(
            ASTNode::Expr(Expr::MethodCall(call, _) | Expr::FnCall(call, _))
            | ASTNode::Stmt(Stmt::FnCall(call, _)),
        ) => Some(call.name.as_str()),
        _ => None,
    };
    if taker.is_some_and(|name| TAKE_CLOSURES.contains(&name)) {
        return Ok(());
    }
    Err(bad(position, format!("a closure must stand as an argument of {}", TAKE_CLOSURES.join(", "))))
}

/// Notes the parameter that `ctx.param(name, default)` asks for.
fn declare(member: &Expr, parameters: &mut Vec<Parameter>) -> Result<(), BadScript> {
    let Expr::MethodCall(call, position) = member else { return Ok(()) };
    if call.name != "param" {
        return Ok(());
    }
    let [name, default] = &call.args[..] else { return Ok(()) };
    let (Some(name), Some(default)) = (literal(name), literal(default)) else {
        return Err(bad(*position, "param takes a name and a default that are written out".to_owned()));
    };
    let Ok(name) = name.into_immutable_string() else {
        return Err(bad(*position, "the name of a parameter must be a string".to_owned()));
    };
    let kind = if let Ok(default) = default.as_int() {
        ParameterKind::Integer { default, min: i64::MIN, max: i64::MAX }
    } else if let Ok(default) = default.as_float() {
        ParameterKind::Number { default, min: f64::MIN, max: f64::MAX }
    } else if let Ok(default) = default.as_bool() {
        ParameterKind::Switch { default }
    } else if let Ok(default) = default.into_immutable_string() {
        ParameterKind::Text { default: default.to_string(), one_of: Vec::new() }
    } else {
        return Err(bad(*position, "a parameter is a number, a text, true or false".to_owned()));
    };
    let parameter = Parameter {
        name: name.to_string().into(),
        kind,
        doc: format!("Asked for in line {}.", position.line().unwrap_or(0)).into(),
    };
    match parameters.iter().find(|known| known.name == parameter.name) {
        None => parameters.push(parameter),
        Some(known) if known.kind == parameter.kind => (),
        Some(_) => {
            return Err(bad(*position, format!("the parameter {name:?} has another default elsewhere")));
        }
    }
    Ok(())
}

/// Returns the value of an expression that is written out.
fn literal(expression: &Expr) -> Option<Dynamic> {
    match expression {
        Expr::IntegerConstant(value, _) => Some((*value).into()),
        Expr::FloatConstant(value, _) => Some((**value).into()),
        Expr::BoolConstant(value, _) => Some((*value).into()),
        Expr::StringConstant(value, _) => Some(value.clone().into()),
        _ => None,
    }
}

fn numbers(mut known: Vec<usize>) -> String {
    known.sort_unstable();
    known.dedup();
    let known: Vec<String> = known.into_iter().map(|number| number.to_string()).collect();
    format!("{} argument(s)", known.join(" or "))
}

/// Levenshtein's distance, in one row.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut before = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let change = before + usize::from(from != *to);
            before = row[j + 1];
            row[j + 1] = change.min(before + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

pub(crate) fn bad(position: Position, message: String) -> BadScript {
    BadScript { line: position.line().unwrap_or(1), column: position.position().unwrap_or(1), message }
}

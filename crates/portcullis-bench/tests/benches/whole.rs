//! What there is to measure, how much is measured, and what the report of a tiny run has, but for its figures, against files in
//! `tests/whole`. With `PORTCULLIS_WRITE_TABLES=1` the tests write the files.

use std::fmt::{Debug, Write};

use portcullis_bench::report::Report;
use portcullis_bench::request::Request;
use portcullis_bench::runner::Options;
use portcullis_bench::{bounce, invalidation, iova, path, pgtable};
use serde_json::Value;

use crate::common::{request, with_all_cores};
use crate::figures::golden::is_golden;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/whole/");

/// When it ends and what stops it is another in each run.
fn all(text: &mut String, name: &str, every: &[impl Debug]) {
    writeln!(text, "-- {name}").unwrap();
    for one in every {
        let one = format!("{one:?}");
        writeln!(text, "{}", one.split(", until: ").next().unwrap()).unwrap();
    }
}

#[test]
fn there_is_what_there_was_to_measure() {
    let mut text = String::new();
    let text = &mut text;
    all(text, "options", &[Options::full(), Options::quick(), Options::tiny()]);
    all(text, "iova: workloads", &iova::WORKLOADS);
    all(text, "iova: subjects", &iova::SUBJECTS);
    all(text, "pgtable: options", &[pgtable::full(), pgtable::quick()]);
    all(text, "pgtable: workloads", &pgtable::work::WORKLOADS);
    all(text, "pgtable: subjects", &pgtable::SUBJECTS);
    all(text, "pgtable: formats", &pgtable::formats());
    all(text, "invalidation: options", &[invalidation::full(), invalidation::quick()]);
    all(text, "invalidation: workloads", &invalidation::WORKLOADS);
    all(text, "invalidation: subjects", &invalidation::SUBJECTS);
    all(text, "bounce: options", &[bounce::full(), bounce::quick()]);
    all(text, "bounce: workloads", &bounce::WORKLOADS);
    all(text, "bounce: subjects", &bounce::SUBJECTS);
    all(text, "path: options", &[path::full(), path::quick()]);
    all(text, "path: workloads", path::workloads());
    all(text, "path: subjects", &path::SUBJECTS);
    is_golden(format!("{FOLDER}subjects.txt"), text);
}

/// The fields of each result, without its figures, and what was not measured. Names of subjects that are missing in the same way stand in
/// one line.
fn shape(report: &Report) -> String {
    let mut text = format!("-- {}: {} profiles\n", report.bench, report.profiles.len());
    let told = |value: &Value| match value {
        Value::Object(fields) => {
            let field = |(name, value): (&String, &Value)| match value {
                Value::String(value) => format!("{name}={value}"),
                Value::Null => format!("{name}=null"),
                Value::Object(_) | Value::Array(_) => format!("{name}=.."),
                _ => name.clone(),
            };
            fields.iter().map(field).collect::<Vec<_>>().join(" ")
        }
        other => other.to_string(),
    };
    for result in &report.results {
        writeln!(text, "{}", told(&serde_json::to_value(result).unwrap())).unwrap();
    }
    for skipped in &report.skipped {
        writeln!(text, "{skipped:?}").unwrap();
    }
    text
}

#[cfg(feature = "rivals")]
#[test]
fn a_report_has_what_it_had() {
    let request = Request { threads: vec![1], ..request() };
    let mut text = String::new();
    with_all_cores(|| {
        text += &shape(&iova::run(&request, |_| ()).unwrap());
        let few = pgtable::Choice { formats: vec!["vtd-ss".into(), "arm-s1-64k".into()], incoherent: true };
        text += &shape(&pgtable::run(&request, &few, |_| ()).unwrap());
        text += &shape(&invalidation::run(&request, "vtd", |_| ()).unwrap());
        let deep = bounce::Choice { profiles: vec!["none".into()], depth: 4 };
        text += &shape(&bounce::run(&request, &deep, |_| ()).unwrap());
        let choice = path::Choice { profile: "none".into(), rival_pt: None, own_domains: true };
        text += &shape(&path::run(&request, &choice, |_| ()).unwrap());
    });
    is_golden(format!("{FOLDER}reports.txt"), &text);
}

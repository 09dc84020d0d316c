//! The daemon's events, awaited and kept.

use crate::lab::{LIMIT, Lab};
use anyhow::{Context, Result, ensure};
use reknit_proto::v1::job_event::Event;
use reknit_proto::v1::{GpuHealthChanged, Incident, JobEvent, LayoutCommitted};
use std::collections::BTreeMap;
use tonic::Streaming;

/// What has been seen so far.
#[derive(Debug)]
pub struct Watch {
    events: Streaming<JobEvent>,
    pub step: u64,
    pub losses: BTreeMap<u64, f64>,
    pub phase: String,
    pub explanation: String,
    pub layouts: Vec<LayoutCommitted>,
    pub incidents: Vec<Incident>,
    pub healths: Vec<GpuHealthChanged>,
    pub samples_missing: u64,
    pub samples_repeated: u64,
    /// Steps whose samples are all accounted for.
    pub complete: u64,
}

impl Watch {
    pub fn new(events: Streaming<JobEvent>) -> Self {
        Self {
            events,
            step: 0,
            losses: BTreeMap::new(),
            phase: String::new(),
            explanation: String::new(),
            layouts: Vec::new(),
            incidents: Vec::new(),
            healths: Vec::new(),
            samples_missing: 0,
            samples_repeated: 0,
            complete: 0,
        }
    }

    /// Goes on with another daemon's events; what was seen stays.
    pub fn follow(&mut self, events: Streaming<JobEvent>) {
        self.events = events;
    }

    pub fn into_events(self) -> Streaming<JobEvent> {
        self.events
    }

    /// Until so many workers train at a place: the layout may have been committed before anybody watched.
    pub async fn until_whole(&mut self, lab: &mut Lab, workers: usize) -> Result<()> {
        while !lab.is_whole(workers).await? {
            self.steps(1).await?;
        }
        Ok(())
    }

    /// What was sent before the daemon died.
    pub async fn until_the_end(&mut self) -> Result<()> {
        let ended = async {
            while let Ok(Some(event)) = self.events.message().await {
                self.take(event)?;
            }
            Ok(())
        };
        tokio::time::timeout(LIMIT, ended).await.context("the events of a dead daemon do not end")?
    }

    /// The degrees of the last layout seen.
    pub fn degrees(&self) -> &[u32] {
        self.layouts.last().map_or(&[], |layout| &layout.degrees)
    }

    /// Takes events until `enough`.
    pub async fn until(&mut self, what: &str, enough: impl Fn(&Self) -> bool) -> Result<()> {
        while !enough(self) {
            let next = tokio::time::timeout(LIMIT, self.events.message()).await;
            let next =
                next.with_context(|| format!("waited {LIMIT:?} for an event on the way to: {what}"))?;
            let event = next?.with_context(|| format!("the events ended on the way to: {what}"))?;
            self.take(event)?;
        }
        Ok(())
    }

    pub async fn until_step(&mut self, step: u64) -> Result<()> {
        self.until(&format!("step {step}"), |seen| seen.step >= step).await
    }

    /// Some more committed steps from here.
    pub async fn steps(&mut self, more: u64) -> Result<()> {
        self.until_step(self.step + more).await
    }

    pub async fn until_degrees(&mut self, degrees: &[u32]) -> Result<()> {
        self.until(&format!("degrees {degrees:?}"), |seen| seen.degrees() == degrees).await
    }

    fn take(&mut self, event: JobEvent) -> Result<()> {
        match event.event.context("an event says something")? {
            Event::Step(step) => {
                let before = self.losses.insert(step.step, step.loss);
                ensure!(before.is_none_or(|loss| loss == step.loss), "step {} has two losses", step.step);
                self.step = self.step.max(step.step);
                if step.complete {
                    self.complete += 1;
                    self.samples_missing += u64::from(step.samples_missing);
                    self.samples_repeated += u64::from(step.samples_repeated);
                }
            }
            Event::Phase(phase) => {
                self.phase = phase.phase;
                self.explanation = phase.explanation;
            }
            Event::Layout(layout) => self.layouts.push(layout),
            Event::Incident(incident) => self.incidents.push(incident),
            Event::Health(health) => self.healths.push(health),
            Event::Worker(_) | Event::Note(_) => {}
        }
        Ok(())
    }
}

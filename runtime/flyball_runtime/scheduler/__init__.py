"""Which tokens the next step computes: waiting and running sequences in, one immutable BatchPlan out."""

{{- define "rl.labels" -}}
app.kubernetes.io/name: rl
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}
